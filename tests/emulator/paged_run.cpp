#include "emulator/paged_run.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "emulator/paged_specs.hpp"
#include "emulator/plan_run.hpp"
#include "emulator/specs.hpp"
#include "emulator/variant_run.hpp"
#include "plan/call_plan.hpp"
#include "plan/catalogue.hpp"
#include "plan/schedule.hpp"
#include "plan/tensor_map.hpp"
#include "reference/geometry.hpp"

namespace emulator {
namespace {

using fa::TensorView;
using fa::plan::KernelSpec;
using fa::plan::Role;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::PagedCase;
using fa::test::PagedData;

constexpr int kSplits = 3;  // of a request's keys

/// Which rows of q belong to a request.
std::vector<bool> rows_of_requests(const PagedCase& c, const PagedData& data) {
  std::vector<bool> taken(static_cast<std::size_t>(data.q.view().shape[2]), !c.packed);
  for (std::size_t i = 0; c.packed && i < c.rows.size(); ++i) {
    for (std::int32_t row = 0; row < c.rows[i]; ++row) {
      const std::int64_t at = std::int64_t{data.cu_q[i]} + row;
      if (at >= 0 && at < std::ssize(taken)) taken[static_cast<std::size_t>(at)] = true;  // wrong ones are not there
    }
  }
  return taken;
}

/// The memory of a call.
class Call {
 public:
  Call(const KernelSpec& spec, const PagedCase& c, const PagedData& data, const PagedRun& run)
      : spec_(spec), data_(data), run_(run), taken_(rows_of_requests(c, data)) {
    args.sequences.cu_q = place_array(memory, "cu_seqlens_q", data.cu_q);
    args.sequences.used_kv = place_array(memory, "seqused_kv", data.used_kv);
    args.paged.batch_index = place_array(memory, "batch_index", data.batch_index);
    args.paged.begin = place_array(memory, "seq_begin", data.begin);
    if (data.contiguous) return;  // how many rows there are, the cache says
    args.paged.table = place_array(memory, "block_table", data.table);
    args.paged.stride_row = data.max_pages;
    args.paged.stride_page = run.one_page ? 0 : 1;
    args.paged.rows = static_cast<std::int32_t>(data.table_rows);
    if (run.trust) forbid_entries();
  }

  TensorView query() {
    const Placed t = place_input(memory, "q", data_.q, Placement::bshd, spec_.aligned);
    if (!spec_.kernel().tensor_maps) forbid_padding(t);  // the copy engine brings whole tiles of rows
    return view_of(t, data_.q);
  }

  TensorView plain(const char* name, const HostTensor& tensor) {
    return view_of(place_input(memory, name, tensor, Placement::bhsd, true), tensor);
  }

  TensorView pool(const char* name, const HostTensor& tensor) {
    // Rows of 8 bits are always aligned, and so are scales of 4.
    const bool stored = size_of(tensor.view().dtype) == 1 || &tensor == &data_.k_scale || &tensor == &data_.v_scale;
    const Placed t = place_input(memory, name, tensor, run_.pool, spec_.aligned || stored);
    for_each_row(t.b, t.h, run_.trust ? t.s : 0, [&](std::int64_t page, std::int64_t h, std::int64_t row) {
      if (!read(page, row)) memory.set_flags(t.row(page, h, row), t.row_bytes, 0);
    });
    return view_of(t, tensor);
  }

  TensorView output(const char* name, HostTensor& tensor) {
    const Placed t = place_output(memory, name, tensor, Placement::bshd, spec_.aligned);
    forbid_padding(t);
    outputs_.push_back({t, &tensor});
    return view_of(t, tensor);
  }

  /// As before the first launch.
  void forget_outputs() {
    for (const auto& [t, tensor] : outputs_) {
      for_each_row(t.b, t.h, t.s, [&, &of = t](std::int64_t b, std::int64_t h, std::int64_t s) {
        const bool taken = taken_[static_cast<std::size_t>(s)] || !run_.trust;
        memory.set_flags(of.row(b, h, s), of.row_bytes, taken ? Memory::kWritable : std::uint8_t{0});
      });
    }
  }

  void fetch_outputs() {
    for (const auto& [t, tensor] : outputs_) {
      const TensorView view = tensor->view();
      for_each_row(t.b, t.h, t.s, [&, &from = t](std::int64_t b, std::int64_t h, std::int64_t s) {
        if (!run_.trust || !taken_[static_cast<std::size_t>(s)]) return;
        const std::byte* row = from.row(b, h, s);
        if (!memory.written(row, from.row_bytes)) throw NotWritten("not written: " + memory.describe(row));
        const std::int64_t to = fa::reference::row_offset(view, b, h, s);
        std::copy_n(row, from.row_bytes,
                    static_cast<std::byte*>(view.data) + to * static_cast<std::int64_t>(from.element));
      });
    }
  }

  Memory memory;
  fa::plan::PackedArgs args;

 private:
  void forbid_padding(const Placed& t) {
    if (!run_.trust) return;
    for_each_row(t.b, t.h, t.s, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      if (!taken_[static_cast<std::size_t>(s)]) memory.set_flags(t.row(b, h, s), t.row_bytes, 0);
    });
  }

  /// Of pages that no row needs.
  void forbid_entries() {
    for (std::size_t i = 0; i < data_.table.size(); ++i) {
      const std::int64_t pages = data_.k.view().shape[0];
      const std::int32_t entry = data_.table[i];
      if (entry < 0 || entry >= pages) memory.set_flags(args.paged.table + i, sizeof entry, 0);
    }
  }

  /// Whether row `row` of a page may be: where some row of q needs it, or boxes of whole rows one beside it.
  bool read(std::int64_t page, std::int64_t row) const {
    const auto* const hopper = std::get_if<fa::plan::Sm90Forward>(&spec_.own);
    const bool wide = hopper != nullptr && hopper->wide_boxes;
    const std::int64_t box = wide ? fa::plan::rows_together(spec_.page_size, spec_.tile_n) : 1;
    const auto first = data_.needed.begin() + page * data_.page_rows + row / box * box;
    return std::find(first, first + box, true) != first + box;
  }

  const KernelSpec& spec_;
  const PagedData& data_;
  const PagedRun& run_;
  std::vector<bool> taken_;
  std::vector<std::pair<Placed, HostTensor*>> outputs_;
};

/// Column sums and top keys in the memory of a call.
class PlacedSums {
 public:
  PlacedSums(const PagedCase& c, const fa::test::PagedSums& like, bool without_sums, Memory& memory)
      : memory_(memory), count_(c.variant.config.statistics.top_keys) {
    if (!without_sums) sums_ = memory.add_output("column_sums", sizeof(float) * like.sums.size());
    if (count_ > 0) top_keys_ = memory.add_output("top_keys", sizeof(std::int32_t) * like.top_keys.size());
    if (sums_ != nullptr) outputs.column_sums = TensorView(sums_, fa::DType::f32, {like.b, like.heads, like.s_kv});
    if (count_ > 0) outputs.top_keys = TensorView(top_keys_, fa::DType::i32, {like.b, like.heads, count_});
  }

  void fetch(fa::test::PagedSums& to) const {
    if (sums_ != nullptr) {
      std::vector<float> sums(to.sums.size());
      fetch(sums_, sums);
      std::ranges::copy(sums, to.sums.begin());
    }
    if (count_ > 0) fetch(top_keys_, to.top_keys);
  }

  fa::StatisticsOutputs outputs;

 private:
  template <class T>
  void fetch(const std::byte* from, std::vector<T>& to) const {
    const std::size_t bytes = sizeof(T) * to.size();
    if (!memory_.written(from, bytes)) throw NotWritten("not written: " + memory_.describe(from));
    std::memcpy(to.data(), from, bytes);
  }

  Memory& memory_;
  std::int64_t count_;
  std::byte* sums_ = nullptr;
  std::byte* top_keys_ = nullptr;
};

}  // namespace

AttentionOutputs run_paged(const KernelSpec& spec, const PagedCase& c, const PagedData& data, const PagedRun& run,
                           fa::test::PagedSums* sums) {
  AttentionOutputs outputs = make_outputs(c, data);
  const fa::test::VariantCase variant = variant_of(c);
  Call call(spec, c, data, run);
  fa::plan::ForwardTensors tensors;
  tensors.q = call.query();
  tensors.k = call.pool("k", data.k);
  tensors.v = call.pool("v", data.v);
  if (c.k_dtype && !c.latent()) tensors.k_scale = call.pool("k_scale", data.k_scale);
  if (c.v_dtype) tensors.v_scale = call.pool("v_scale", data.v_scale);
  if (c.scaled) {
    tensors.q_scale = call.plain("q_scale", data.q_scale);
    if (!data.row_bias.bytes().empty()) tensors.row_bias = call.plain("row_bias", data.row_bias);
    tensors.k_scale = c.key_scales ? call.pool("k_scale", data.k_scale) : call.plain("k_scale", data.k_scale);
    tensors.v_scale = c.value_scales ? call.pool("v_scale", data.v_scale) : call.plain("v_scale", data.v_scale);
  }
  tensors.o = call.output("o", outputs.o);
  tensors.lse = call.output("lse", outputs.lse);
  std::optional<PlacedSums> placed_sums;
  if (sums != nullptr) tensors.statistics = placed_sums.emplace(c, *sums, run.without_sums, call.memory).outputs;
  const PlacedVariant placed(call.memory, variant, false);
  tensors.variant = placed.tensors();
  const fa::plan::Problem problem = problem_of(spec, c, data, variant);
  PlanKernels kernels;
  kernels.specs[Role::attention] = spec;
  kernels.names[Role::attention] = run.kernel;
  if (spec.split) kernels.specs[Role::combine] = combine_spec(spec);
  add_companions(problem, kernels);
  const fa::plan::Choice choice{.pack_gqa = spec.pack_gqa,
                                .scheduled = spec.scheduled(),
                                .own_parts = spec.own_parts(),
                                .multicast = spec.is<fa::plan::Sm90WideForward>() && spec.cluster() > 1,
                                .family = spec.family(),
                                .splits = splits_of(spec, kSplits),
                                .split_blocks = spec.cluster()};
  kernels.names[Role::schedule] = run.schedule_kernel;
  kernels.names[Role::column_sums] = run.sums_kernel;
  fa::plan::CallFacts facts{static_cast<double>(c.attention.softmax_scale()), run.multiprocessors, false, call.args};
  if (run.launches > 0 && spec.scheduled()) {
    fa::plan::CallPlan plan;
    facts.schedule = place_schedule(problem, spec, run.multiprocessors, call.memory);
    plan_schedule(problem, kernels.specs, facts, plan);
    run_plan(plan, kernels, call.memory, run.schedule, run.trust);
  }
  for (int i = 0; i < std::max(run.launches, 1); ++i) {
    if (i > 0) call.forget_outputs();
    fa::plan::CallPlan plan;
    plan_call(problem, choice, kernels.specs, tensors, facts, plan);
    run_plan(plan, kernels, call.memory, run.schedule, run.trust);
    const fa::kernel::PagedParams& paged = plan.forward_params.attention.base.paged;
    if (spec.own_parts()) expect_flags_down(static_cast<const std::uint64_t*>(paged.schedule), 2 * paged.parts);
    call.fetch_outputs();
    if (placed_sums) placed_sums->fetch(*sums);
  }
  return outputs;
}

double worst_of(const PagedCase& c, const PagedData& data, const HostTensor& actual, const HostTensor& expected) {
  const std::vector<bool> taken = rows_of_requests(c, data);
  const TensorView view = expected.view();
  double worst = 0;
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; taken[static_cast<std::size_t>(s)] && d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      const double got = actual.at(b, h, s, d);
      const double wanted = expected.at(b, h, s, d);
      if (got == wanted) continue;
      const double error = std::abs(got - wanted);
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
  });
  return worst;
}

}  // namespace emulator
