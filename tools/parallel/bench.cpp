// Times context parallelism of the GPUs that a launcher has started this program on, beside one GPU with the whole
// sequence, which every rank computes at the same time, so that clocks and power are those of the load.
//
//   examples/context_parallel/launch.py 2 parallel_bench [--tokens 16384,65536,262144] [--heads 16/16,32/8]
//       [--schemes ring,all_gather,ulysses,automatic] [--layout zigzag] [--full] [--repeats 10] [--packed]
//
// A row: sizes, milliseconds of one GPU and of all, efficiency T1 / (n Tn), and what docs/scale.md's model says.
// --packed shares a packed batch of lengths from 256 to 32k, log-uniform.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/parallel.hpp>

#include "ranks.hpp"

namespace {

constexpr std::int64_t kColumns = 128;

struct Options {
  std::vector<std::int64_t> tokens{16384, 65536, 262144};
  std::vector<std::pair<std::int64_t, std::int64_t>> heads{{16, 16}, {32, 8}};
  std::vector<fa::Scheme> schemes{fa::Scheme::ring, fa::Scheme::all_gather, fa::Scheme::ulysses, fa::Scheme::automatic};
  fa::ShardLayout layout = fa::ShardLayout::zigzag;
  bool causal = true;
  bool packed = false;
  int repeats = 10;
};

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// Memory of noise, of which tensors are views.
class Memory {
 public:
  explicit Memory(std::size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    memory_.reset(memory);
  }
  void fill(std::size_t elements, std::uint32_t seed) {
    std::vector<std::uint16_t> data(elements);
    std::mt19937 random(seed);
    for (std::uint16_t& number : data) {
      // Normal numbers, from the sum of four uniform ones.
      float sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<float>(random() >> 8) / (1 << 24) - 0.5F;
      const float value = sum * 1.7F;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      number = static_cast<std::uint16_t>(bits >> 16);
    }
    check(cudaMemcpy(memory_.get(), data.data(), elements * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

/// q, k, v, o, lse, dout, dq, dk, dv of a call.
class Tensors {
 public:
  Tensors(std::int64_t h_q, std::int64_t h_kv, std::int64_t rows, bool packed) : rows_(rows), packed_(packed) {
    for (const std::int64_t heads : {h_q, h_kv, h_kv, h_q, h_q, h_q, h_kv, h_kv}) {
      const auto elements = static_cast<std::size_t>(heads * rows * kColumns);
      memory_.push_back(std::make_unique<Memory>(elements * 2));
      memory_.back()->fill(elements, static_cast<std::uint32_t>(memory_.size()));
      views_.push_back(packed ? fa::TensorView(memory_.back()->get(), fa::DType::bf16, {rows, heads, kColumns})
                              : fa::TensorView(memory_.back()->get(), fa::DType::bf16, {1, heads, rows, kColumns}));
    }
    memory_.push_back(std::make_unique<Memory>(static_cast<std::size_t>(h_q * rows) * 4));
    lse_ = packed ? fa::TensorView(memory_.back()->get(), fa::DType::f32, {h_q, rows})
                  : fa::TensorView(memory_.back()->get(), fa::DType::f32, {1, h_q, rows});
  }
  fa::ForwardInputs forward_inputs() const { return {views_[0], views_[1], views_[2]}; }
  fa::ForwardOutputs forward_outputs() const { return {views_[3], lse_}; }
  fa::BackwardInputs backward_inputs() const { return {views_[0], views_[1], views_[2], views_[3], lse_, views_[4]}; }
  fa::BackwardOutputs backward_outputs() const { return {views_[5], views_[6], views_[7]}; }

 private:
  std::int64_t rows_;
  bool packed_;
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<fa::TensorView> views_;
  fa::TensorView lse_;
};

/// Agrees with other ranks on numbers, by the communicator itself.
class Ranks {
 public:
  explicit Ranks(std::shared_ptr<fa::Communicator> communicator)
      : communicator_(std::move(communicator)),
        memory_(sizeof(double) * static_cast<std::size_t>(communicator_->size())) {}

  fa::Communicator& communicator() const { return *communicator_; }
  std::shared_ptr<fa::Communicator> shared() const { return communicator_; }

  /// The greatest of what ranks have. All have come here then.
  double greatest(double own, cudaStream_t stream) {
    const int me = communicator_->rank(), size = communicator_->size();
    std::vector<double> all(static_cast<std::size_t>(size), own);
    auto* const at = static_cast<double*>(memory_.get());
    check(cudaMemcpyAsync(at, all.data(), all.size() * sizeof(double), cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    std::vector<fa::Communicator::Transfer> transfers;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      transfers.push_back({true, peer, at + me, 1, fa::DType::f64});
      transfers.push_back({false, peer, at + peer, 1, fa::DType::f64});
    }
    communicator_->wait(communicator_->exchange(transfers, stream), stream);
    communicator_->synchronize(stream);
    check(cudaMemcpy(all.data(), at, all.size() * sizeof(double), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return *std::ranges::max_element(all);
  }

 private:
  std::shared_ptr<fa::Communicator> communicator_;
  Memory memory_;
};

/// The median of repeats, of the slowest rank, in milliseconds.
template <class Call>
double time(Ranks& ranks, cudaStream_t stream, int repeats, const Call& call) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    ranks.greatest(0, stream);  // together
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    call();
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    ranks.communicator().synchronize(stream);
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    times.push_back(ranks.greatest(static_cast<double>(milliseconds), stream));
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::ranges::sort(times);
  return times[times.size() / 2];
}

/// Lengths from 256 to 32k, log-uniform, that ranks can divide, of so many tokens in all.
std::vector<std::int64_t> lengths_of(std::int64_t tokens, int ranks) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> logarithm(std::log(256.0), std::log(32768.0));
  std::vector<std::int64_t> lengths;
  const std::int64_t unit = 2 * ranks;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const auto drawn = static_cast<std::int64_t>(std::exp(logarithm(random))) / unit * unit;
    lengths.push_back(std::min(std::max(drawn, unit), left));
  }
  return lengths;
}

struct Times {
  double forward = 0, both = 0;
};

class Bench {
 public:
  Bench(const Options& options, std::shared_ptr<fa::Communicator> communicator)
      : options_(options), ranks_(std::move(communicator)) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~Bench() { cudaStreamDestroy(stream_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void run() {
    const int n = ranks_.communicator().size();
    if (ranks_.communicator().rank() == 0) {
      std::printf("| tokens | heads | scheme | 1 GPU fwd, fwd + bwd (ms) | %d GPUs | efficiency | model |\n", n);
      std::printf("|---|---|---|---|---|---|---|\n");
    }
    for (const std::int64_t tokens : options_.tokens) {
      for (const auto& [h_q, h_kv] : options_.heads) row(tokens, h_q, h_kv);
    }
  }

 private:
  fa::AttentionConfig attention() const {
    fa::AttentionConfig config;
    config.head_dim = kColumns;
    config.causal = options_.causal;
    config.varlen = options_.packed;
    return config;
  }

  Times single(std::int64_t tokens, std::int64_t h_q, std::int64_t h_kv, const std::vector<std::int64_t>& lengths) {
    const Tensors whole(h_q, h_kv, tokens, options_.packed);
    const auto one = fa::Attention::create(attention());
    std::vector<std::int32_t> ends{0};
    for (const std::int64_t length : lengths) ends.push_back(ends.back() + static_cast<std::int32_t>(length));
    const Memory cu(ends.size() * 4);
    check(cudaMemcpy(cu.get(), ends.data(), ends.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    fa::ForwardInputs forward = whole.forward_inputs();
    fa::BackwardInputs backward = whole.backward_inputs();
    if (options_.packed) {
      const auto* const at = static_cast<const std::int32_t*>(cu.get());
      const std::int64_t longest = *std::ranges::max_element(lengths);
      forward.sequences = {static_cast<std::int64_t>(lengths.size()), at, at, nullptr, nullptr, longest, longest};
      backward.sequences = forward.sequences;
    }
    const auto run_forward = [&] { one.forward(forward, whole.forward_outputs(), stream_); };
    const auto run_both = [&] {
      run_forward();
      one.backward(backward, whole.backward_outputs(), stream_);
    };
    return {time(ranks_, stream_, options_.repeats, run_forward), time(ranks_, stream_, options_.repeats, run_both)};
  }

  void row(std::int64_t tokens, std::int64_t h_q, std::int64_t h_kv) {
    const int n = ranks_.communicator().size();
    std::vector<std::int64_t> lengths;
    if (options_.packed) lengths = lengths_of(tokens, n);
    const Times one = single(tokens, h_q, h_kv, lengths);
    const Tensors own(h_q, h_kv, tokens / n, options_.packed);
    for (const fa::Scheme scheme : options_.schemes) {
      fa::ContextParallelConfig config;
      config.attention = attention();
      config.scheme = scheme;
      if (scheme == fa::Scheme::ulysses && h_kv % n != 0) continue;
      auto parallel = fa::ContextParallel::create(config, ranks_.shared(), options_.layout);
      parallel.check_agreement(stream_);
      const fa::ContextShape shape{1, h_q, h_kv, tokens, tokens};
      parallel.prepare(shape, true, lengths);
      const auto forward = [&] { parallel.forward(own.forward_inputs(), own.forward_outputs(), stream_, lengths); };
      const auto both = [&] {
        forward();
        parallel.backward(own.backward_inputs(), own.backward_outputs(), stream_, lengths);
      };
      const Times all{time(ranks_, stream_, options_.repeats, forward), time(ranks_, stream_, options_.repeats, both)};
      if (ranks_.communicator().rank() != 0) continue;
      const fa::SchemeTime model = parallel.scheme(shape, lengths);
      std::printf("| %lld | %lld/%lld | %s (%s, ulysses %d) | %.3f, %.3f | %.3f, %.3f | %.3f, %.3f | %.3f |\n",
                  static_cast<long long>(tokens), static_cast<long long>(h_q), static_cast<long long>(h_kv),
                  to_string(scheme), to_string(model.scheme), model.ulysses, one.forward, one.both, all.forward,
                  all.both, one.forward / n / all.forward, one.both / n / all.both, model.efficiency(n));
      std::fflush(stdout);
    }
  }

  const Options& options_;
  Ranks ranks_;
  cudaStream_t stream_ = nullptr;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

template <class Enum>
Enum named(const std::string& text, Enum last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (text == to_string(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw std::runtime_error(text + " is no layout or scheme");
}

Options options_of(int count, char** values) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = values[i];
    if (name == "--full") {
      options.causal = false;
      continue;
    }
    if (name == "--packed") {
      options.packed = true;
      continue;
    }
    if (i + 1 == count) throw std::runtime_error(name + " is no option, or takes a value");
    const std::vector<std::string> parts = split(values[++i]);
    if (name == "--tokens") {
      options.tokens.clear();
      for (const std::string& part : parts) options.tokens.push_back(std::stoll(part));
    } else if (name == "--heads") {
      options.heads.clear();
      for (const std::string& part : parts) {
        options.heads.emplace_back(std::stoll(part), std::stoll(part.substr(part.find('/') + 1)));
      }
    } else if (name == "--schemes") {
      options.schemes.clear();
      for (const std::string& part : parts) options.schemes.push_back(named(part, fa::Scheme::ulysses));
    } else if (name == "--layout") {
      options.layout = named(parts.at(0), fa::ShardLayout::striped);
    } else if (name == "--repeats") {
      options.repeats = std::max(std::stoi(parts.at(0)), 1);
    } else {
      throw std::runtime_error(name +
                               ": accepted are --tokens, --heads, --schemes, --layout, --repeats, --full, --packed");
    }
  }
  return options;
}

}  // namespace

int main(int count, char** values) {
  try {
    const Options options = options_of(count, values);
    const ranks::Rank rank;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices <= rank.local) {
      std::printf("rank %d has no GPU %d\n", rank.rank, rank.local);
      return 77;
    }
    check(cudaSetDevice(rank.local), "cudaSetDevice");
    const ranks::NcclGroup group(rank);
    Bench(options, fa::use_nccl(group.comm())).run();
    return 0;
  } catch (const std::exception& problem) {
    std::printf("parallel_bench: %s\n", problem.what());
    return 1;
  }
}
