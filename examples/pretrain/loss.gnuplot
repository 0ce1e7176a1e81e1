# Validation loss against steps, bytes and time: gnuplot -c loss.gnuplot RATE, with the link's rate in Mbit/s.
# Reads curves.csv, writes loss.svg and loss.png, all in the current folder.
rate = ARG1
curves = "curves.csv"
runs = system("tail -n +2 curves.csv | cut -d, -f1 | uniq")

# Greys for the dense runs, a hue for each rule, darker for each further sparsity.
greys = "#a0a0a0 #303030"
oranges = "#f2a65a #d1603d #8c2f39"
blues = "#6cb8d6 #1f78b4 #123f6d"
starts_with(text, start) = text[1:strlen(start)] eq start
shade(i) = i > 3 ? 3 : i
scapes = 0
clocks = 0
colours = ""
do for [run in runs] {
  colour = word(greys, run eq "adamw" ? 1 : 2)
  if (starts_with(run, "scape")) { scapes = scapes + 1; colour = word(oranges, shade(scapes)) }
  if (starts_with(run, "clock")) { clocks = clocks + 1; colour = word(blues, shade(clocks)) }
  colours = colours." ".colour
}
title_of(run) = run eq "adamw" ? "AdamW, dense" : run eq "adams" ? "AdamS, dense" : system("echo '".run."' | tr - ' '")

# The first part of the fall is cut off: what matters is the end.
set datafile separator comma
stats curves using "validation_loss" name "loss" nooutput
fall = loss_max - loss_min
top = loss_min + 0.6 * fall
bottom = loss_min - 0.03 * fall

set border 3 linecolor "#606060"
set tics nomirror textcolor "#404040"
set grid linecolor "#e4e4e4" linetype 1 linewidth 0.8
array titles[3] = ["steps", "MB sent by each rank", "seconds, with a link of ".rate." Mbit/s a rank"]
array values[3] = ["step", "bytes_sent_per_rank", "seconds_on_the_link"]
array scales[3] = [1, 1e-6, 1]

do for [format in "svg png"] {
  if (format eq "svg") { set terminal svg size 1260,440 font "Helvetica,Arial,sans-serif,14" background "white" }
  if (format eq "png") { set terminal pngcairo size 2520,880 fontscale 2 linewidth 2 font "sans,10" background "white" }
  set output "loss.".format
  set multiplot layout 1,3 margins 0.06,0.985,0.27,0.96 spacing 0.05
  set yrange [bottom:top]
  set ylabel "validation loss, nats a byte" offset 1
  set key off
  do for [p = 1:3] {
    set xlabel titles[p]
    if (p == 2) { set logscale x; unset ylabel } else { unset logscale x }
    plot for [i = 1:words(runs)] curves \
      using (strcol("run") eq word(runs, i) ? scales[p] * column(values[p]) : NaN):"validation_loss" \
      with lines linewidth 2.2 linecolor rgb word(colours, i)
  }
  # The legend is a plot of its own, without anything else, over the whole width.
  set margins screen 0, screen 1, screen 0.01, screen 0.09
  set key center horizontal samplen 2 width 1
  unset xlabel; unset border; unset tics; unset grid
  plot for [i = 1:words(runs)] [0:1] NaN with lines linewidth 3 linecolor rgb word(colours, i) title title_of(word(runs, i))
  unset multiplot
  set border 3 linecolor "#606060"
  set xtics nomirror; set ytics nomirror; set grid
  set margins
}
