#ifndef FA_TESTS_GPU_PAGED_CASE_HPP_
#define FA_TESTS_GPU_PAGED_CASE_HPP_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gpu/packed_case.hpp"
#include "support/paged_case.hpp"

namespace fa::test {

inline std::vector<std::byte> bytes_of(const std::vector<std::int32_t>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(std::int32_t));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline const std::int32_t* ints(const DeviceBuffer& buffer) {
  return buffer.size() == 0 ? nullptr : static_cast<const std::int32_t*>(buffer.data());
}

inline AttentionConfig config_of(const PagedCase& c) {
  AttentionConfig config = variant_of(c).config;
  config.tune = TunePolicy::off;
  return config;
}

/// A call's tensors and arrays on the device.
class DevicePaged {
 public:
  explicit DevicePaged(const PagedCase& c) : DevicePaged(c, make_data(c)) {}
  DevicePaged(const PagedCase& c, const PagedData& data)
      : problem(c),
        host(data),
        q(data.q),
        k(data.k),
        v(data.v),
        k_scale(data.k_scale),
        v_scale(data.v_scale),
        q_scale(data.q_scale),
        o(make_outputs(c, data).o),
        lse(make_outputs(c, data).lse),
        cu_q(bytes_of(data.cu_q)),
        used_kv(bytes_of(data.used_kv)),
        begin(bytes_of(data.begin)),
        batch_index(bytes_of(data.batch_index)),
        table(bytes_of(data.table)),
        functions(variant_of(c)),
        variant(functions) {}

  ForwardInputs inputs() const {
    const TensorView value = problem.value_in_key ? TensorView() : v.const_view();
    ForwardInputs in{q.const_view(), k.const_view(), value, variant.given, variant.sink_view};
    in.sequences = host.sequences();
    in.sequences.cu_seqlens_q = ints(cu_q);
    in.sequences.seqused_kv = ints(used_kv);
    in.cache = host.cache();
    if (in.cache.block_table.defined()) in.cache.block_table.data = table.data();
    in.cache.batch_index = ints(batch_index);
    in.cache.seq_begin = ints(begin);
    if (problem.k_dtype && !problem.latent()) in.k_scale = k_scale.const_view();
    if (problem.v_dtype) in.v_scale = v_scale.const_view();
    if (problem.scaled) set_scales_of_8_bits(in);
    return in;
  }
  ForwardOutputs outputs() const { return {o.view(), lse.view()}; }

  /// Other requests of the same numbers of rows, in the same memory. The new table fits the old pool.
  void become(const PagedCase& c, const PagedData& data) {
    problem = c;
    host = data;
    k.buffer.write(data.k.bytes());
    v.buffer.write(data.v.bytes());
    if (c.k_dtype && !c.latent()) k_scale.buffer.write(data.k_scale.bytes());
    if (c.v_dtype) v_scale.buffer.write(data.v_scale.bytes());
    used_kv.write(bytes_of(data.used_kv));
    table.write(bytes_of(data.table));
    o.buffer.write(make_outputs(c, data).o.bytes());
    lse.buffer.write(make_outputs(c, data).lse.bytes());
  }

  AttentionOutputs results() const {
    driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
    AttentionOutputs actual = make_outputs(problem, host);
    o.read(actual.o);
    lse.read(actual.lse);
    for (const DeviceBuffer* buffer : {&q.buffer, &k.buffer, &v.buffer, &o.buffer, &lse.buffer, &table}) {
      EXPECT_TRUE(buffer->guards_intact());
    }
    return actual;
  }

  void expect_forward() const {
    const AttentionOutputs actual = results();
    const AttentionOutputs expected = reference_f64(problem, host);
    // V of 8 bits is multiplied by P in bf16.
    const DType dtype = problem.v_dtype ? DType::bf16 : problem.attention.dtype;
    const double o_bound = dtype == DType::bf16 ? 3e-2 : dtype == DType::f16 ? 6e-3 : 1e-4;
    EXPECT_LE(worst(actual.o, expected.o), o_bound) << "o";
    EXPECT_LE(worst(actual.lse, expected.lse), dtype == DType::f32 ? 2e-4 : 1e-2) << "lse";
  }

  PagedCase problem;
  PagedData host;
  DeviceTensor q, k, v, k_scale, v_scale, q_scale, o, lse;
  DeviceBuffer cu_q, used_kv, begin, batch_index, table;
  VariantCase functions;  // whose names the variant refers to
  DeviceVariant variant;

 private:
  void set_scales_of_8_bits(ForwardInputs& in) const {
    in.q_scale = q_scale.const_view();
    if (problem.packed) {
      in.q_scale.rank = 2;
      in.q_scale.shape = {in.q_scale.shape[1], in.q_scale.shape[2]};
      in.q_scale.strides = {in.q_scale.strides[1], in.q_scale.strides[2]};
    }
    in.k_scale = k_scale.const_view();
    in.v_scale = v_scale.const_view();
    if (!problem.key_scales) in.k_scale.rank = 2;
    if (!problem.value_scales) in.v_scale.rank = 2;
  }

  /// Rows of no request are expected to be what they were.
  double worst(const HostTensor& actual, const HostTensor& expected) const {
    const TensorView view = expected.view();
    std::vector<bool> taken(static_cast<std::size_t>(view.shape[2]), !problem.packed);
    for (std::size_t i = 0; problem.packed && i < problem.rows.size(); ++i) {
      for (std::int32_t r = 0; r < problem.rows[i]; ++r) taken[static_cast<std::size_t>(host.cu_q[i] + r)] = true;
    }
    double result = 0;
    for (std::int64_t b = 0; b < view.shape[0]; ++b) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t s = 0; s < view.shape[2]; ++s) {
          for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
            const double got = actual.at(b, h, s, d), wanted = expected.at(b, h, s, d);
            if (!taken[static_cast<std::size_t>(s)]) {
              EXPECT_TRUE(std::isnan(got)) << "row " << s << " was written";
            } else if (got != wanted) {
              const double error = std::abs(got - wanted);
              result = std::isnan(error) ? HUGE_VAL : std::max(result, error);
            }
          }
        }
      }
    }
    return result;
  }
};

inline void run(const PagedCase& c) {
  SCOPED_TRACE(::testing::PrintToString(c));
  const DevicePaged device(c);
  Attention::create(config_of(c)).forward(device.inputs(), device.outputs());
  device.expect_forward();
}

/// `attention` throws an error that names `argument`.
inline void expect_refused(const Attention& attention, const PagedCase& c, const PagedData& data,
                           const std::string& argument) {
  const DevicePaged device(c, data);
  try {
    attention.forward(device.inputs(), device.outputs());
    ADD_FAILURE() << "nothing was thrown about " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.field("argument"), argument) << error.what();
  }
}

}  // namespace fa::test

#endif  // FA_TESTS_GPU_PAGED_CASE_HPP_
