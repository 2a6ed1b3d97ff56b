#include "emulator/fp8_specs.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>

#include <fa/paged.hpp>

#include "emulator/joined.hpp"
#include "emulator/sm80_fp8_specs.hpp"
#include "plan/sm90_fp8_forward.hpp"
#include "support/variant_case.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;

struct Shape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, stages, q_buffers, value_columns;
  bool causal, take_turns, ahead, single_level, half_output, pack_gqa;
  bool byte_output = false;
  bool key_scales = false;
  bool value_scales = false;
  bool precise = false;
  bool split = false;
  bool half_bytes = false;
  int polynomials = 0;
  bool shared_scales = false;
  bool scales_of_all = false;
};

constexpr Shape kShapes[] = {
    {DType::e4m3, 128, 128, 128, 64, 2, 2, 64, true, true, true, false, false, false},  // mutants
    {DType::e4m3, 64, 64, 64, 128, 2, 1, 64, false, false, false, false, false, false},
    {DType::e4m3, 64, 64, 64, 128, 2, 1, 64, false, false, false, true, false, false},  // the same of a single level
    {DType::e4m3, 64, 64, 192, 64, 3, 2, 64, true, true, true, false, true, false},
    {DType::e4m3, 128, 128, 192, 128, 2, 2, 128, true, false, false, false, false, false},  // planned
    {DType::e4m3, 32, 64, 256, 64, 3, 2, 64, true, false, false, false, true, false},
    {DType::e5m2, 64, 96, 128, 32, 3, 1, 48, true, false, false, false, true, false},
    {DType::e4m3, 256, 256, 128, 96, 2, 1, 64, true, true, false, false, false, false},
    {DType::e4m3, 80, 48, 64, 96, 2, 2, 16, true, false, true, false, false, true},
    {DType::e4m3, 128, 112, 128, 128, 2, 1, 112, true, true, false, true, true, false},
    {DType::e5m2, 16, 144, 128, 160, 1, 2, 144, false, true, true, false, false, false},
    {DType::e4m3, 64, 96, 128, 96, 2, 1, 48, true, false, false, false, false, false, true},
    {DType::e4m3, 32, 64, 192, 64, 2, 2, 64, false, true, false, false, false, false, false, true},
    {DType::e5m2, 64, 48, 64, 128, 2, 1, 48, true, false, false, true, true, true, false, true},
    {DType::e4m3, 64, 128, 128, 128, 2, 1, 128, true, true, false, false, false, false, false, false, true},
    {DType::e4m3, 64, 64, 128, 96, 2, 2, 64, true, true, true, false, false, false, false, true, true},
    {DType::e4m3, 128, 128, 128, 64, 2, 2, 128, true, true, true, true, false, false, false, false, false, true},
    {DType::e4m3, 64, 64, 192, 80, 2, 1, 64, false, false, false, true, false, false, false, false, false, true},
    {DType::e5m2, 32, 96, 128, 48, 3, 1, 96, true, true, false, true, true, true, false, false, false, true},
    {DType::e4m3, 256, 256, 64, 64, 1, 1, 256, false, false, true, true, false, false, false, true, false, true},
    {DType::e4m3, 64, 112, 192, 80, 2, 2, 112, true, true, true, true, true, false, false, true, true, true},
    {DType::e4m3, 80, 48, 128, 96, 2, 2, 48, false, false, false, true, false, true, false, false, true, true},
    // of i8
    {DType::i8, 128, 128, 128, 64, 2, 2, 64, true, true, true, false, false, false},
    {DType::i8, 64, 64, 192, 128, 2, 1, 64, false, true, false, false, true, false},
    {DType::i8, 64, 64, 128, 96, 2, 2, 64, true, true, true, false, false, false, false, true, true},
    {DType::i8, 256, 96, 64, 64, 2, 1, 48, false, false, false, false, false, true, true, true, false},
    {DType::i8, 80, 112, 128, 80, 2, 2, 112, true, true, true, true, true, false, false, true, true, true},
    {DType::i8, 64, 128, 128, 128, 1, 2, 128, false, true, false, false, false, false},
    // of splits
    {DType::e4m3, 64, 64, 64, 64, 3, 2, 64, true, false, true, false, false, true, false, false, false, false, true},
    {DType::i8, 64, 96, 64, 96, 2, 2, 48, false, false, false, false, true, true, false, false, false, false, true},
    {DType::i8, 128, 128, 128, 64, 2, 1, 64, true, true, true, false, false, false, true, true, true, false, true},
    {DType::e4m3, 80, 48, 64, 64, 3, 1, 48, false, false, true, true, false, true, false, true, true, true, true},
    {DType::e5m2, 32, 128, 192, 128, 2, 1, 128, true, false, false, false, false, false, false, false, false, false,
     true},
    // of P by way of f16, and exponentials as polynomials
    {DType::e4m3, 64,    64,    192,   128,   3,     2,     64,    true,  false,
     false,       false, false, false, false, false, false, false, false, true},
    {DType::e4m3, 64,   64,   128,   64,   2,     2,     64,    false, true, true,
     false,       true, true, false, true, false, false, false, true,  3},
    {DType::i8, 64,    64,    64,    96,    2,     1,     64,   true, false, true,
     false,     false, false, false, false, false, false, true, true, 1},
    {DType::e5m2, 64,    96,    64,    128,  2,    1,     48,    true,  false, false,
     false,       false, false, false, true, true, false, false, false, 8},
    // scales of keys by shared memory, P relative to the greatest of V so far
    {DType::e4m3, 64,    128,   128,  128,  2,     1,     64,    true, true, true, false,
     false,       false, false, true, true, false, false, false, 0,    true, true},
    {DType::i8, 64,    64,    128,  64,   2,     2,     64,    true, true, true, false,
     false,     false, false, true, true, false, false, false, 0,    true, false},
    {DType::e4m3, 80,   48,    128,  80,   2,    2,     48,    false, true, true, true,
     false,       true, false, true, true, true, false, false, 0,     true, false},
    {DType::e5m2, 64,    96,    64,    96,   2,     1,    48,    false, false, false, false,
     false,       false, false, false, true, false, true, false, 0,     false, true},
    // planned: three consumers in turns
    {DType::e4m3, 64, 64, 192, 128, 3, 2, 64, false, true, false, false, false, false},
    {DType::e4m3, 64, 64, 192, 128, 3, 2, 64, true, true, false, false, false, false},
};
constexpr std::size_t kOfInt8 = 22, kOfInt8Scales = 24;
constexpr std::size_t kOfSplits = 28, kOfInt8Splits = 29, kOfHalfBytes = 33, kOfPolynomials = 34, kOfSharedScales = 37;
constexpr std::size_t kOfLateSums = 41;
constexpr std::size_t kOfBytes = 11, kOfKeyScales = 15, kOfPrecise = 16, kOfPreciseScales = 20;
constexpr Shape kPackedShapes[] = {
    {DType::e4m3, 64, 64, 128, 64, 2, 2, 64, true, true, true, false, false, false},
    {DType::e4m3, 48, 80, 64, 96, 2, 1, 80, false, false, false, false, true, true},
    {DType::e5m2, 128, 128, 192, 64, 2, 2, 64, true, false, false, false, false, false, true},
    {DType::e4m3, 64, 64, 128, 64, 2, 2, 64, true, true, true, false, false, false, false, true, true},
    {DType::i8, 64, 64, 128, 64, 2, 2, 64, true, true, true, false, false, false, false, true, true},
    {DType::e5m2, 64, 64, 128, 80, 2, 2, 64, true, true, true, true, true, false, false, true, true, true},
};

/// Of the first kernel over pages: in front of it are the others, of both families.
std::size_t place_of_pages() {
  return fp8_specs().size() + fp8_packed_specs().size();
}

struct PagedShape {
  Shape shape;
  int page_size;
  bool varlen;
};
constexpr PagedShape kPagedShapes[] = {
    {{DType::e4m3, 64, 64, 128, 64, 2, 2, 64, true, true, true, false, false, false, false, true, true}, 16, true},
    {{DType::e4m3, 128, 128, 128, 128, 2, 1, 64, true, false, false, false, false, false}, 64, false},
    {{DType::e5m2, 48, 80, 64, 96, 2, 2, 80, false, false, true, false, true, true}, 24, true},
    {{DType::e4m3, 64, 96, 192, 64, 3, 2, 48, true, true, false, false, false, false, true, true}, 8, false},
    {{DType::e4m3, 64, 64, 128, 64, 2, 2, 64, true, true, true, true, false, false, false, true, true, true},
     128,
     true},
    {{DType::e4m3, 64, 64, 128, 96, 2, 1, 64, true, false, false, false, false, false, false, false, true},
     static_cast<int>(fa::kContiguous),
     false},
    {{DType::i8, 64, 64, 128, 64, 2, 2, 64, true, true, true, false, false, false, false, true, true}, 16, true},
    {{DType::e4m3, 64, 64, 64, 64, 3, 2, 64, true, false, true, false, false, true, false, true, true, false, true},
     16,
     false},
    {{DType::i8, 64, 96, 128, 96, 2, 1, 48, false, false, false, false, false, false, false, false, false, false, true},
     static_cast<int>(fa::kContiguous),
     false},
};

KernelSpec spec_of(const Shape& shape, bool varlen, int page_size = 0) {
  KernelSpec spec;
  auto& own = spec.own.emplace<fa::plan::Sm90Fp8Forward>();
  spec.arch = {9, 0, 'a'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.tile_m = shape.tile_m;
  spec.tile_n = shape.tile_n;
  spec.stages = shape.stages;
  spec.causal = shape.causal;
  spec.pack_gqa = shape.pack_gqa;
  spec.varlen = varlen;
  spec.page_size = page_size;
  spec.split = shape.split;
  own.half_bytes = shape.half_bytes;
  own.polynomials = shape.polynomials;
  own.shared_scales = shape.shared_scales;
  own.scales_of_all = shape.scales_of_all;
  own.q_buffers = shape.q_buffers;
  own.value_columns = shape.value_columns;
  own.take_turns = shape.take_turns;
  own.ahead = shape.ahead;
  own.single_level = shape.single_level;
  own.half_output = shape.half_output;
  own.byte_output = shape.byte_output;
  own.key_scales = shape.key_scales;
  own.value_scales = shape.value_scales;
  own.precise = shape.precise;
  spec.warps = fa::plan::sm90_fp8_forward_warps(spec);
  const std::string refusal = fa::plan::sm90_fp8_forward_refusal(spec);
  if (!refusal.empty()) throw std::logic_error(refusal);
  return spec;
}

std::vector<KernelSpec> specs_of(std::span<const Shape> shapes, bool varlen) {
  std::vector<KernelSpec> found;
  for (const Shape& shape : shapes) found.push_back(spec_of(shape, varlen));
  return found;
}

/// Of the choices of these names, by the specs in turn.
std::vector<Fp8Variant> variants_of(const std::vector<std::string>& names, const std::vector<KernelSpec>& specs) {
  std::vector<Fp8Variant> found;
  for (const fa::test::VariantChoice& choice : fa::test::variant_choices(false)) {
    if (std::ranges::find(names, choice.name) == names.end()) continue;
    KernelSpec spec = specs[found.size() % specs.size()];
    fa::test::AttentionCase c;
    c.d_qk = spec.d_qk;
    c.d_v = spec.d_v;
    const fa::test::VariantCase made(c, choice);
    spec.variants = made.functions.variants;
    spec.causal = made.config.causal || made.config.window_right >= 0;
    found.push_back({choice.name, spec});
  }
  return found;
}

}  // namespace

Fp8Facts fp8_facts(const KernelSpec& spec) {
  if (spec.is<fa::plan::Sm80Fp8Forward>()) {
    const auto& own = spec.as<fa::plan::Sm80Fp8Forward>();
    return {own.half_output, own.byte_output, own.key_scales, own.value_scales, false};
  }
  const auto& own = spec.as<fa::plan::Sm90Fp8Forward>();
  return {own.half_output, own.byte_output, own.key_scales, own.value_scales, own.precise};
}

const std::vector<KernelSpec>& fp8_specs() {
  static const std::vector<KernelSpec> specs = joined({specs_of(kShapes, false), sm80_fp8_specs()});
  return specs;
}

const std::vector<KernelSpec>& fp8_packed_specs() {
  static const std::vector<KernelSpec> specs = joined({specs_of(kPackedShapes, true), sm80_fp8_packed_specs()});
  return specs;
}

const std::vector<KernelSpec>& fp8_paged_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> found;
    for (const auto& [shape, page_size, varlen] : kPagedShapes) found.push_back(spec_of(shape, varlen, page_size));
    return joined({found, sm80_fp8_paged_specs()});
  }();
  return specs;
}

const std::vector<Fp8Variant>& fp8_variants() {
  static const std::vector<Fp8Variant> variants = [] {
    const std::vector<std::string> names{"softcap",   "alibi",   "bias", "window",
                                         "two_sided", "chunked", "sink", "window_sink"};
    std::vector<Fp8Variant> all = variants_of(names, {fp8_specs()[1], fp8_specs()[3], fp8_specs()[kOfPrecise]});
    const std::vector<Fp8Variant> of_int8 =
        variants_of(names, {fp8_specs()[kOfInt8], fp8_specs()[kOfInt8Scales], fp8_specs()[kOfInt8 + 1]});
    all.insert(all.end(), of_int8.begin(), of_int8.end());
    const std::vector<Fp8Variant> of_splits =
        variants_of({"softcap", "two_sided", "chunked", "sink", "window_sink"},
                    {fp8_specs()[kOfSplits], fp8_specs()[kOfInt8Splits], fp8_specs()[kOfInt8Splits + 1]});
    all.insert(all.end(), of_splits.begin(), of_splits.end());
    const std::vector<Fp8Variant> by_mma = variants_of(
        {"softcap", "bias", "documents", "by_head", "two_sided", "chunked", "window_sink"}, sm80_fp8_specs());
    all.insert(all.end(), by_mma.begin(), by_mma.end());
    return all;
  }();
  return variants;
}

const std::vector<Fp8Variant>& fp8_packed_variants() {
  static const std::vector<Fp8Variant> variants =
      joined({variants_of({"softcap", "alibi", "two_sided", "chunked", "window_sink"},
                          {fp8_packed_specs()[0], fp8_packed_specs()[std::size(kPackedShapes) - 1]}),
              variants_of({"softcap", "documents", "chunked"}, sm80_fp8_packed_specs())});
  return variants;
}

namespace {

constexpr const char* kForward = "sm90/sm90_fp8_forward.cuh";
constexpr const char* kProducer = "sm90/sm90_fp8_producer.cuh";
constexpr const char* kPageBox = "sm90/sm90_page_box.cuh";
constexpr const char* kEpilogue = "sm90/sm90_fp8_epilogue.cuh";
constexpr const char* kTraits = "sm90/sm90_fp8_traits.cuh";
constexpr const char* kSoftmax = "sm90/sm90_fp8_softmax.cuh";

/// P in 16 bits beside V in 8.
std::vector<Fp8Mutation> precise_mutations() {
  using enum FaultKind;
  return {{"fp8_wide_columns_exchanged",
           kProducer,
           "store_wide(to_keys, bytes[i], kEven);",
           "store_wide(to_keys, bytes[i], kOdd);",
           {},
           kOfPrecise},
          {"fp8_wide_chunks_not_exchanged",
           kProducer,
           "(columns % 4 * 2 ^ row) * kernel::kChunkBytes",
           "columns % 4 * 2 * kernel::kChunkBytes",
           {},
           kOfPrecise},
          {"fp8_wide_scores_not_waited_for",
           kForward,
           "ptx::wgmma_wait<1>(); const bool rises = take_scores(at, next.index);",
           "const bool rises = take_scores(at, next.index);",
           {register_in_flight},
           kOfPrecise},
          {"fp8_wide_output_not_waited_for",
           kForward,
           "const bool rises = take_scores(at, next.index); ptx::wgmma_wait<0>();",
           "const bool rises = take_scores(at, next.index);",
           {register_in_flight},
           kOfPrecise},
          {"fp8_wide_output_keeps_old_maxima",
           kForward,
           "at.v_slot = next; if (rises) multiply(at.o[0], at.softmax.factor);",
           "at.v_slot = next; if (rises && at.left < 0) multiply(at.o[0], at.softmax.factor);",
           {},
           kOfPrecise},
          {"fp8_precise_probabilities_in_eight_bits",
           kForward,
           "ptx::convert_pair<kernel::f16>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1])",
           "(ptx::convert_pair<kernel::f16>(s[8 * step + 2 * word], s[8 * step + 2 * word + 1]) & 0xff80ff80)",
           {},
           kOfPrecise},
          {"fp8_greatest_scale_of_all_does_not_rise",
           kForward,
           "factor *= any ? at.values_by * inverse : 0.f;",
           "factor *= any ? 1.f : 0.f;",
           {},
           kOfPreciseScales},
          {"fp8_greatest_scale_of_all_is_lost",
           kForward,
           "multiply(at.o[slice], {at.values_by, at.values_by});",
           "multiply(at.o[slice], {1.f, 1.f});",
           {},
           kOfPreciseScales}};
}

/// V transposed, and operands in the order that the products read.
std::vector<Fp8Mutation> operand_mutations() {
  using enum FaultKind;
  return {{"fp8_transposed_before_it_has_landed",
           kProducer,
           "ptx::mbarrier_wait(landed(slot.index), slot.parity);",
           "",
           {shared_in_flight, shared_uninitialised, shared_race, barrier_misuse, deadlock}},
          {"fp8_transposed_over_what_is_read",
           kProducer,
           "ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);  // consumers have read what was there",
           "",
           {source_overwritten, shared_race, barrier_misuse}},
          {"fp8_transposed_without_a_fence",
           kProducer,
           "ptx::fence_proxy_async();  // products read it",
           "",
           {unfenced, shared_race, shared_in_flight}},
          {"fp8_transposed_by_one_lane",
           kProducer,
           "ptx::sync_warp();          // all lanes have read and written",
           "",
           {shared_race, source_overwritten, unfenced, shared_uninitialised}},
          {"fp8_values_loaded_over_what_is_transposed",
           kProducer,
           "ptx::mbarrier_wait(taken(slot.index), slot.parity ^ 1);",
           "static_cast<void>(slot);",
           {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
          {"fp8_keys_loaded_over_what_is_read",
           kProducer,
           "ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);  // all have read what was there",
           "",
           {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
          {"fp8_query_loaded_over_what_is_read",
           kProducer,
           "ptx::mbarrier_wait(q_empty(slots.q.index), slots.q.parity ^ 1);  // all have read what was there",
           "",
           {source_overwritten, shared_race, shared_in_flight, barrier_misuse},
           1},
          {"fp8_keys_in_the_order_of_memory",
           kProducer,
           "kEven = 0x6420, kOdd = 0x7531",
           "kEven = 0x5140, kOdd = 0x7362",
           {}},
          {"fp8_columns_exchanged", kProducer, "kEven = 0x6420, kOdd = 0x7531", "kEven = 0x7531, kOdd = 0x6420", {}},
          {"fp8_probabilities_in_the_order_of_scores",
           kForward,
           "ptx::convert_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5])",
           "ptx::convert_e4m3(s[i], s[i + 4], s[i + 1], s[i + 5])",
           {}}};
}

/// The main loop: products, edges and scales.
std::vector<Fp8Mutation> product_mutations() {
  using enum FaultKind;
  return {{"fp8_values_not_waited_for",
           kForward,
           "ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity);",
           "static_cast<void>(at);",
           {shared_in_flight, shared_uninitialised, shared_race, unfenced, source_overwritten, barrier_misuse}},
          {"fp8_scores_not_waited_for",
           kForward,
           "ptx::wgmma_wait<1>(); ptx::wgmma_tie(added); add(at.o[kSlices - 1], added, at); "
           "ptx::wgmma_wait<0>();",
           "ptx::wgmma_wait<1>(); ptx::wgmma_tie(added); add(at.o[kSlices - 1], added, at);",
           {register_in_flight}},
          {"fp8_slice_not_waited_for",
           kForward,
           "ptx::wgmma_wait<1>(); ptx::wgmma_tie(added); add(at.o[kSlices - 1], added, at); "
           "ptx::wgmma_wait<0>();",
           "ptx::wgmma_tie(added); add(at.o[kSlices - 1], added, at); ptx::wgmma_wait<0>();",
           {register_in_flight}},
          {"fp8_second_level_dropped",
           kForward,
           "o[i] = ptx::fma(o[i], factor[i / 2 % 2], added[i]);",
           "o[i] = factor[0] < 0.f ? o[i] : added[i];",
           {}},
          {"fp8_output_keeps_old_maxima",
           kForward,
           "o[i] = ptx::fma(o[i], factor[i / 2 % 2], added[i]);",
           "o[i] = factor[0] < 0.f ? 0.f : o[i] + added[i];",
           {}},
          {"fp8_last_keys_are_seen",
           kForward,
           "this->hide_behind(at.s, cursor, this->first_limit(cursor, row), row);",
           "static_cast<void>(row);",
           {}},
          {"fp8_edge_of_the_last_row",
           kForward,
           "at.edge = limit / kTileN - query.range.begin;",
           "at.edge = (limit + kTileN) / kTileN - query.range.begin;",
           {},
           0,
           1,
           false},
          {"fp8_signs_of_scales_do_not_count",
           kForward,
           "if (sign[0] != 1.f || sign[1] != 1.f) multiply(at.s, sign);",
           "if (sign[0] == 64.f) multiply(at.s, sign);",
           {}},
          {"fp8_query_released_early",
           kForward,
           "if (at.left == 0) release(q_empty(at.count % kQBuffers), ptx::lane_index());",
           "if (at.left == 1) release(q_empty(at.count % kQBuffers), ptx::lane_index());",
           {source_overwritten, shared_race, shared_in_flight, barrier_misuse, deadlock}},
          {"fp8_scales_of_values_do_not_count",
           kEpilogue,
           "softmax.inverse_sum(r) * scale;",
           "(scale == 0.f ? scale : softmax.inverse_sum(r));",
           {}},
          {"fp8_sums_of_the_other_scale",
           kSoftmax,
           "ptx::max(ptx::fma(score, scale_log2, -kShift), kLeast)",
           "ptx::max(score * scale_log2, kLeast)",
           {},
           1}};
}

/// Scales of keys and values.
std::vector<Fp8Mutation> key_scale_mutations() {
  using enum FaultKind;
  return {{"fp8_maxima_of_one_lane",
           kSoftmax,
           "bits[r] = ptx::max3(bits[r], ptx::shfl_xor(bits[r], 2), kBitsBelowAll);",
           "",
           {}},
          {"fp8_bytes_of_columns_exchanged",
           kEpilogue,
           "ptx::convert_e4m3(slice[i] * factor, slice[i + 4] * factor, slice[i + 1] * factor,",
           "ptx::convert_e4m3(slice[i] * factor, slice[i + 1] * factor, slice[i + 4] * factor,",
           {},
           kOfBytes},
          {"fp8_scales_of_every_other_key",
           kForward,
           "ptx::shfl(ptx::bits(of[n / 4]), n % 4 * 8 + pair + e)",
           "ptx::shfl(ptx::bits(of[n / 4]), n % 4 * 8 + pair)",
           {},
           kOfKeyScales},
          {"fp8_scales_of_the_next_keys",
           kForward,
           "const int n = query.range.begin + left;",
           "const int n = query.range.begin + left + 1;",
           {},
           kOfKeyScales},
          {"fp8_scales_behind_the_last_key",
           kTraits,
           "const int existing = key < lengths.s_kv ? key : lengths.s_kv - 1;",
           "const int existing = key;",
           {global_out_of_bounds, global_uninitialised},
           kOfKeyScales},
          {"fp8_signs_of_values_overwrite_a_descriptor",
           kForward,
           "ptx::settle_signed(pairs, this->work_shared(0));",
           "ptx::settle(pairs, this->work_shared(0));",
           {shared_race, global_out_of_bounds, global_uninitialised},
           kOfKeyScales},
          {"fp8_scales_of_values_of_another_tile",
           kForward,
           "o[i] = ptx::fma(added[i], at.values_by, o[i] * factor[i / 2 % 2]);",
           "o[i] = ptx::fma(added[i], ptx::abs(at.values.of[0]), o[i] * factor[i / 2 % 2]);",
           {},
           kOfKeyScales},
          {"fp8_greatest_scale_of_a_lane",
           kForward,
           "most = ptx::max(most, ptx::shfl_xor(most, mask));",
           "most = ptx::max(most, ptx::shfl_xor(most, 0));",
           {},
           kOfKeyScales},
          {"fp8_scales_of_the_first_keys",
           kTraits,
           "kernel::offset_of_keys<Traits::kVarlen>(",
           "0 * kernel::offset_of_keys<Traits::kVarlen>(",
           {},
           fp8_specs().size() + 3},
          {"fp8_scales_of_the_first_sequence",
           kTraits,
           "ptx::ld_global_nc(scales.q + first + head * scales.stride_q_h",
           "ptx::ld_global_nc(scales.q + first * 0 + head * scales.stride_q_h",
           {},
           fp8_specs().size()},
          {"fp8_negative_scores_in_the_order_of_bits",
           kSoftmax,
           "rare = rare || (bits[r] <= 0 && greatest[r] < 0.f);",
           "",
           {}}};
}

/// Sums beside the product of P, and maxima that stay.
std::vector<Fp8Mutation> late_sum_mutations() {
  return {{"fp8_greater_scores_are_not_followed",
           kSoftmax,
           "ptx::from_bits(static_cast<uint32_t>(greater(own[r]))) <= greatest[r] && greatest[r] >= 0.f",
           "greater(own[r]) != -1 && greatest[r] >= 0.f",
           {},
           kOfLateSums},
          {"fp8_sums_left_out", kForward, "at.softmax.add_sums(at.s);", "", {}, kOfLateSums}};
}

/// Pages.
std::vector<Fp8Mutation> page_mutations() {
  const std::size_t of_pages = place_of_pages();
  using enum FaultKind;
  return {{"fp8_box_of_a_page_ends_with_the_page",
           kPageBox,
           "kPageSize < 0 || behind < kPageSize ? behind : kPageSize;",
           "behind < 0 ? 0 : kPageSize;",
           {global_uninitialised},
           of_pages},
          {"fp8_boxes_of_one_lane",
           kProducer,
           "if (lane >= Traits::kBoxes) return;",
           "if (lane > 0) return;",
           {deadlock, shared_in_flight, shared_uninitialised, barrier_misuse},
           of_pages},
          {"fp8_box_of_the_first_row",
           kPageBox,
           "const int row = keys.row_in_page(first);",
           "const int row = 0 * first;",
           {},
           of_pages + 4},
          {"fp8_scales_of_the_first_row_of_pages",
           kTraits,
           "keys.row_in_page(key) * stride_s)",
           "0 * keys.row_in_page(key) * stride_s)",
           {},
           of_pages},
          {"fp8_scales_of_the_first_page",
           kTraits,
           "ptx::ld_global_nc(scales + page * stride_page",
           "ptx::ld_global_nc(scales + 0 * page * stride_page",
           {},
           of_pages}};
}

/// Queries and keys of i8.
std::vector<Fp8Mutation> int8_mutations() {
  return {{"fp8_whole_numbers_taken_for_floats",
           "common/int8.cuh",
           "ptx::from_bits(ptx::bits(bits_of_x) + kInt8BiasBits)",
           "bits_of_x + kInt8Bias",
           {},
           kOfInt8},
          {"fp8_log_sum_above_the_bias",
           kSoftmax,
           "kBiased ? ptx::fma(-kernel::kInt8Bias, scale_log2, subtracted) : subtracted",
           "subtracted + 0.f * scale_log2",
           {},
           kOfInt8},
          {"fp8_signs_of_the_bias",
           kForward,
           "ptx::fma(s[i] - kernel::kInt8Bias, sign[i / 2 % 2], kernel::kInt8Bias)",
           "s[i] * sign[i / 2 % 2]",
           {},
           kOfInt8},
          {"fp8_bias_of_the_first_row",
           kTraits,
           "head * bias.stride_h + position * bias.stride_s",
           "head * bias.stride_h + 0 * position",
           {},
           kOfInt8},
          {"fp8_bias_of_rows_without_the_scale",
           kEpilogue,
           "lse = ptx::fma(params.scale, this->row_bias",
           "lse = ptx::fma(0.5f * params.scale, this->row_bias",
           {},
           kOfInt8},
          {"fp8_scales_of_i8_keys_in_one_half",
           kForward,
           "at.s[i + 2] = ptx::fma(at.s[i + 2], scale, of_bias);",
           "at.s[i + 2] -= kernel::kInt8Bias;",
           {},
           kOfInt8Scales},
          {"fp8_scales_of_i8_keys_above_the_bias",
           kForward,
           "const float of_bias = ptx::multiply(scale, -kernel::kInt8Bias);",
           "const float of_bias = 0.f;",
           {},
           kOfInt8Scales}};
}

/// Splits of few rows, which another kernel joins.
std::vector<Fp8Mutation> split_mutations() {
  using enum FaultKind;
  return {{"fp8_splits_in_one_place",
           kEpilogue,
           "static_cast<int64_t>(query.tile.split) * params.b",
           "0 * static_cast<int64_t>(query.tile.split) * params.b",
           {global_uninitialised},
           kOfSplits},
          {"fp8_columns_of_a_split_exchanged",
           kEpilogue,
           "ptx::bits(slice[i + 4] * factor), ptx::bits(slice[i + 1] * factor)",
           "ptx::bits(slice[i + 1] * factor), ptx::bits(slice[i + 4] * factor)",
           {},
           kOfSplits},
          {"fp8_first_part_in_every_split",
           "common/forward_schedule.cuh",
           "range.begin = start_of_part(tiles, params.splits, split);",
           "range.begin = start_of_part(tiles, params.splits, 0 * split);",
           {},
           kOfSplits},
          {"fp8_splits_without_the_bias_of_rows",
           kEpilogue,
           "sum.add(params.scale * this->row_bias(query, head, position));",
           "",
           {},
           kOfInt8Splits},
          {"fp8_sum_of_a_split_above_the_bias_of_i8",
           kSoftmax,
           "kBiased ? ptx::fma(-kernel::kInt8Bias, scale_log2, subtracted) : subtracted",
           "subtracted + 0.f * scale_log2",
           {},
           kOfInt8Splits}};
}

/// What an override asks for alone.
std::vector<Fp8Mutation> override_mutations() {
  using enum FaultKind;
  return {{"fp8_scales_of_other_threads",
           kForward,
           "lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2",
           "lane % 16",
           {},
           kOfSharedScales},
          {"fp8_scales_read_before_they_are_there",
           kForward,
           "ptx::sync_warp();  // the scales are there",
           "",
           {shared_race, shared_uninitialised},
           kOfSharedScales},
          {"fp8_scales_over_those_that_are_read",
           kForward,
           "ptx::sync_warp();  // all lanes have read what was there",
           "",
           {shared_race},
           kOfSharedScales},
          {"fp8_output_keeps_an_old_greatest_scale",
           kForward,
           "factor *= any ? at.values_by * inverse : 0.f;",
           "factor *= any ? 1.f : 0.f;",
           {},
           kOfSharedScales},
          {"fp8_bytes_of_halves_rounded_too_far",
           "common/half_bytes.cuh",
           "constexpr uint32_t kHalfUnits = 0x00800080u;",
           "constexpr uint32_t kHalfUnits = 0x01800080u;",
           {},
           kOfHalfBytes},
          {"fp8_bytes_of_halves_exchanged",
           "common/half_bytes.cuh",
           "high + high + kHalfUnits, 0x7531);",
           "high + high + kHalfUnits, 0x5731);",
           {},
           kOfHalfBytes},
          {"fp8_halves_of_greater_probabilities", kTraits, "kHalfBytes ? 0 : 8", "8", {}, kOfHalfBytes},
          {"fp8_polynomial_of_another_power",
           "common/exponential.cuh",
           "(ptx::bits(whole) << 23) + 0x3f800000u",
           "(ptx::bits(whole) << 23) + 0x40000000u",
           {},
           kOfPolynomials},
          {"fp8_polynomial_of_masked_scores",
           "common/exponential.cuh",
           "const float inside = ptx::max_nan(x, -127.f);",
           "const float inside = x;",
           {},
           kOfPolynomials}};
}

}  // namespace

const std::vector<Fp8Mutation>& fp8_mutations() {
  static const std::vector<Fp8Mutation> all =
      joined({precise_mutations(), operand_mutations(), product_mutations(), key_scale_mutations(), page_mutations(),
              int8_mutations(), split_mutations(), override_mutations(), late_sum_mutations(),
              sm80_fp8_mutations({std::size(kShapes), fp8_specs().size() + std::size(kPackedShapes),
                                  place_of_pages() + std::size(kPagedShapes)})});
  return all;
}

}  // namespace emulator
