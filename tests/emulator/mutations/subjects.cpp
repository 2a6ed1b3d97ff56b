#include "emulator/mutations/subjects.hpp"

#include <algorithm>
#include <stdexcept>

#include "emulator/append_specs.hpp"
#include "emulator/merge_specs.hpp"
#include "emulator/packed_specs.hpp"
#include "emulator/paged_specs.hpp"
#include "emulator/variant_specs.hpp"

namespace emulator {
namespace {

template <class Wanted>
KernelSpec packed_forward(const Wanted& wanted) {
  const auto found = std::ranges::find_if(packed_forward_specs(), wanted);
  if (found == packed_forward_specs().end()) throw std::out_of_range("no such kernel");
  return *found;
}

KernelSpec with_dropout(Family family) {
  return packed_forward([&](const KernelSpec& spec) {
    return spec.family() == family && spec.dropout && spec.dtype != DType::f32 && !spec.varlen && !spec.pack_gqa;
  });
}

}  // namespace

Subject::Subject(KernelSpec of) : spec(std::move(of)) {}

Subject::Subject(const Sm90BackwardVariant& variant)
    : spec(backward_specs_of(variant).main), hopper_backward(variant) {}

Subject::Subject(fa::test::AppendCase kind) : spec(append_spec(kind)), append(std::move(kind)) {}

Subject::Subject(fa::test::MergeCase kind) : spec(merge_spec(kind)), merge(kind) {}

KernelSpec sm80(int stages) {
  KernelSpec spec;
  spec.arch = {8, 0, '\0'};
  spec.dtype = DType::bf16;
  spec.d_qk = 64;
  spec.d_v = 64;
  spec.tile_m = 32;
  spec.tile_n = 32;
  spec.warps = 2;
  spec.stages = stages;
  return spec;
}

KernelSpec sm80_q_in_registers() {
  return changed(sm80(2), [](KernelSpec& spec) { spec.as<fa::plan::Sm80Forward>().q_in_registers = true; });
}

KernelSpec sm80_unaligned() {
  return changed(sm80(1), [](KernelSpec& spec) { spec.aligned = false; });
}

KernelSpec sm80_split() {
  return changed(sm80(1), [](KernelSpec& spec) { spec.split = true; });
}

KernelSpec sm90_split() {
  return changed(sm90(), [](KernelSpec& spec) { spec.split = true; });
}

KernelSpec sm80_packed_gqa() {
  return changed(sm80(1), [](KernelSpec& spec) { spec.pack_gqa = true; });
}

KernelSpec sm80_pair(int stages) {
  return changed(sm80(stages), [](KernelSpec& spec) { spec.warps_n = 2; });
}

KernelSpec sm80_group(int stages) {
  return changed(sm80(stages), [](KernelSpec& spec) {
    spec.warps = 4;
    spec.warps_n = 4;
    spec.tile_n = 32;
  });
}

KernelSpec sm80_fp32() {
  return changed(sm80(1), [](KernelSpec& spec) { spec.dtype = DType::f32; });
}

KernelSpec sm80_dropout() {
  return with_dropout(Family::sm80);
}

KernelSpec on_turing(KernelSpec spec) {
  spec.arch = {7, 5, '\0'};
  if (spec.dtype == DType::bf16) spec.dtype = DType::f16;
  return spec;
}

KernelSpec sm80_backward() {
  KernelSpec spec = sm80(2);
  spec.own = fa::plan::Sm80Backward{};
  spec.warps = 4;
  spec.warps_n = 2;
  spec.as<fa::plan::Sm80Backward>().dq_warps_m = 2;
  return spec;
}

KernelSpec sm80_backward_dq() {
  return changed(sm80(2), [](KernelSpec& spec) { spec.own = fa::plan::Sm80BackwardDq{}; });
}

KernelSpec sm90() {
  KernelSpec spec;
  spec.own = fa::plan::Sm90Forward{};
  spec.arch = {9, 0, 'a'};
  spec.d_qk = 64;
  spec.d_v = 80;
  spec.tile_m = 128;
  spec.tile_n = 32;
  spec.warps = 12;
  spec.stages = 2;
  spec.as<fa::plan::Sm90Forward>().q_buffers = 1;
  spec.as<fa::plan::Sm90Forward>().take_turns = true;
  return spec;
}

KernelSpec sm90_causal() {
  return changed(sm90(), [](KernelSpec& spec) { spec.causal = true; });
}

KernelSpec sm90_skipping() {
  return changed(sm90_causal(), [](KernelSpec& spec) {
    spec.tile_m = 192;
    spec.warps = 16;
    spec.as<fa::plan::Sm90Forward>().skips_hidden = true;
    spec.as<fa::plan::Sm90Forward>().softmax_chunks = 2;  // one of which may be hidden
  });
}

KernelSpec sm90_exact_max() {
  return changed(sm90_causal(), [](KernelSpec& spec) { spec.as<fa::plan::Sm90Forward>().exact_max = true; });
}

KernelSpec sm90_own_ends() {
  return changed(sm90_causal(), [](KernelSpec& spec) {
    spec.tile_m = 192;
    spec.warps = 16;
    spec.tile_n = 48;
    spec.as<fa::plan::Sm90Forward>().q_buffers = 2;
    spec.d_v = spec.d_qk;  // columns behind d_v of a staged O are those of Q
    spec.as<fa::plan::Sm90Forward>().take_turns = spec.as<fa::plan::Sm90Forward>().own_ends =
        spec.as<fa::plan::Sm90Forward>().dynamic = true;
  });
}

KernelSpec sm90_exchanging() {
  return changed(sm90_own_ends(), [](KernelSpec& spec) {
    spec.tile_m = 256;
    spec.warps = 20;
    spec.as<fa::plan::Sm90Forward>().take_turns = false;
  });
}

KernelSpec sm90_rotating() {
  return changed(sm90_own_ends(),
                 [](KernelSpec& spec) { spec.causal = spec.as<fa::plan::Sm90Forward>().dynamic = false; });
}

KernelSpec sm90_dropout() {
  return with_dropout(Family::sm90);
}

KernelSpec sm90_varlen() {
  return packed_forward([](const KernelSpec& spec) {
    return spec.family() == Family::sm90 && spec.varlen && !spec.dropout && !spec.pack_gqa;
  });
}

KernelSpec sm90_varlen_dynamic() {
  return packed_forward([](const KernelSpec& spec) { return spec.dynamic() && spec.varlen; });
}

KernelSpec sm90_backward() {
  KernelSpec spec;
  spec.own = fa::plan::Sm90Backward{.rows_without_keys = true};  // of the causal ones
  spec.arch = {9, 0, 'a'};
  spec.d_qk = 80;
  spec.d_v = 64;
  spec.tile_m = 64;
  spec.tile_n = 128;
  spec.warps = 12;
  spec.stages = 2;
  return spec;
}

Subject sm90_variant(const std::string& choice) {
  const auto found = std::ranges::find(hopper_variant_kernels(), choice, &VariantKernels::choice);
  if (found == hopper_variant_kernels().end()) throw std::out_of_range("no such choice: " + choice);
  Subject subject = hopper_variant_specs(*found).forward;
  subject.choice = choice;
  return subject;
}

Subject over_pages(const std::string& choice, Family family) {
  Subject subject = paged_kernel(choice, family).spec;
  subject.choice = choice;
  return subject;
}

Subject flat(Subject subject) {
  subject.scale = 0.01f;
  return subject;
}

Subject steep(Subject subject) {
  subject.scale = 64.f;
  return subject;
}

Subject far(Subject subject) {
  subject.scale = 1e12f;
  return subject;
}

Subject two_entries(Subject subject) {
  subject.entries = 2;
  return subject;
}

Subject spoilt_row(Subject subject) {
  subject.spoilt = Spoilt::row;
  return subject;
}

Subject spoilt_key(Subject subject) {
  subject.spoilt = Spoilt::key;
  return subject;
}

}  // namespace emulator
