"""docs/link.md: text by hand, tables by programs, each between two markers."""
import pathlib

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "link.md"


def table(rows):
    """Markdown of rows, the first of which is the header; numbers stand right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [all(row[i][:1] in "0123456789+-" for row in cells[1:]) for i in range(len(widths))]
    lines = ["| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)) + " |"
             for row in cells]
    rule = "|" + "|".join(" ---: " if r else " --- " for r in right) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write(name, text):
    """Prints the text and puts it between the document's markers of that name."""
    print(f"\n{name}\n\n{text}\n", flush=True)
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    document = DOCUMENT.read_text()
    if begin not in document or end not in document:
        raise SystemExit(f"{DOCUMENT.name} has no markers for '{name}'")
    before, rest = document.split(begin, 1)
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")
