#pragma once

// All of scape that plain C++ may use.

#include <scape/adams.hpp>
#include <scape/agreement.hpp>
#include <scape/bfloat16.hpp>
#include <scape/bit_packer.hpp>
#include <scape/clock_rule.hpp>
#include <scape/communicator.hpp>
#include <scape/delayed_mask_scheduler.hpp>
#include <scape/density_schedule.hpp>
#include <scape/error.hpp>
#include <scape/gradient.hpp>
#include <scape/host/finite.hpp>
#include <scape/host/hash.hpp>
#include <scape/host/pack.hpp>
#include <scape/host/select.hpp>
#include <scape/host/stream.hpp>
#include <scape/host/update.hpp>
#include <scape/layout.hpp>
#include <scape/mask_plan.hpp>
#include <scape/memory.hpp>
#include <scape/offload.hpp>
#include <scape/plan_tables.hpp>
#include <scape/residual_store.hpp>
#include <scape/scape_rule.hpp>
#include <scape/sharding.hpp>
#include <scape/shared_flag.hpp>
#include <scape/sparse_buffer_reducer.hpp>
#include <scape/stream.hpp>
#include <scape/thread_communicator.hpp>
#include <scape/topk_masker.hpp>
#include <scape/update_rule.hpp>
#include <scape/version.hpp>
