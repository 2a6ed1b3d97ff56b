#include "gpu.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace bench {
namespace {

constexpr std::size_t kDrawn = std::size_t{1} << 21;  // 4 MB
constexpr int kFilled = 4;                            // q, k, v, dout
constexpr std::int64_t kLinkElements = std::int64_t{128} << 20;

/// Sums of four uniform numbers, of standard deviation 1, one block after the other.
const std::vector<std::uint16_t>& noise() {
  static const std::vector<std::uint16_t> numbers = [] {
    std::vector<std::uint16_t> drawn(kDrawn * kFilled);
    std::mt19937 random(1);
    for (std::uint16_t& number : drawn) {
      float sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<float>(random() >> 8) / (1 << 24) - 0.5F;
      const float value = sum * 1.7F;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      number = static_cast<std::uint16_t>(bits >> 16);
    }
    return drawn;
  }();
  return numbers;
}

/// Events that mark a round: one before the calls, and one behind each forward and each backward.
class Events {
 public:
  explicit Events(std::size_t count) : events_(count) {
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Events() {
    for (cudaEvent_t const event : events_) cudaEventDestroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(events_.at(next_++), stream), "cudaEventRecord"); }
  double between(std::size_t from, std::size_t to) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_.at(from), events_.at(to)), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds);
  }

 private:
  std::vector<cudaEvent_t> events_;
  std::size_t next_ = 0;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

Memory::Memory(std::size_t bytes, fa::Communicator* sharing) {
  void* memory = nullptr;
  if (sharing != nullptr) {
    memory = sharing->share(bytes);
  } else {
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
  }
  memory_ = {memory, FreeMemory{sharing}};
}

void Memory::fill(std::size_t elements, int which) {
  auto* const to = static_cast<std::uint16_t*>(memory_.get());
  std::size_t filled = std::min(elements, kDrawn);
  check(cudaMemcpy(to, noise().data() + kDrawn * static_cast<std::size_t>(which), filled * 2, cudaMemcpyHostToDevice),
        "cudaMemcpy");
  for (; filled < elements; filled += std::min(filled, elements - filled)) {
    check(cudaMemcpy(to + filled, to, std::min(filled, elements - filled) * 2, cudaMemcpyDeviceToDevice), "cudaMemcpy");
  }
}

Tensors::Tensors(std::int64_t h_q, std::int64_t h_kv, std::int64_t rows, bool packed, fa::Communicator* sharing) {
  int which = 0;
  for (const std::int64_t heads : {h_q, h_kv, h_kv, h_q, h_q, h_q, h_kv, h_kv}) {
    const auto elements = static_cast<std::size_t>(heads * rows * kColumns);
    const bool is_key = memory_.size() == 1 || memory_.size() == 2;
    memory_.push_back(std::make_unique<Memory>(elements * 2, is_key ? sharing : nullptr));
    const bool is_o = memory_.size() == 4, is_gradient = memory_.size() > 5;
    if (!is_o && !is_gradient) memory_.back()->fill(elements, which++);
    views_.push_back(packed ? fa::TensorView(memory_.back()->get(), fa::DType::bf16, {rows, heads, kColumns})
                            : fa::TensorView(memory_.back()->get(), fa::DType::bf16, {1, heads, rows, kColumns}));
  }
  memory_.push_back(std::make_unique<Memory>(static_cast<std::size_t>(h_q * rows) * 4));
  lse_ = packed ? fa::TensorView(memory_.back()->get(), fa::DType::f32, {h_q, rows})
                : fa::TensorView(memory_.back()->get(), fa::DType::f32, {1, h_q, rows});
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

std::size_t Tensors::bytes(std::int64_t h_q, std::int64_t h_kv, std::int64_t rows) {
  return static_cast<std::size_t>(4 * (h_q + h_kv) * rows * kColumns * 2 + h_q * rows * 4);
}

Ranks::Ranks(std::shared_ptr<fa::Communicator> communicator)
    : communicator_(std::move(communicator)),
      memory_(sizeof(double) * static_cast<std::size_t>(communicator_->size())) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

Ranks::~Ranks() {
  cudaStreamDestroy(stream_);
}

void Ranks::barrier() {
  const int me = communicator_->rank();
  auto* const at = static_cast<double*>(memory_.get());
  std::vector<fa::Communicator::Transfer> transfers;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == me) continue;
    transfers.push_back({true, peer, at + me, 1, fa::DType::f64});
    transfers.push_back({false, peer, at + peer, 1, fa::DType::f64});
  }
  if (!transfers.empty()) communicator_->wait(communicator_->exchange(transfers, stream_), stream_);
}

double Ranks::greatest(double own) {
  std::vector<double> all(static_cast<std::size_t>(size()), own);
  const std::size_t bytes = all.size() * sizeof(double);
  check(cudaMemcpyAsync(memory_.get(), all.data(), bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  barrier();
  communicator_->synchronize(stream_);
  check(cudaMemcpy(all.data(), memory_.get(), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return *std::ranges::max_element(all);
}

Times Ranks::round(int calls, const std::function<void()>& forward, const std::function<void()>& backward) {
  Events events(2 * static_cast<std::size_t>(calls) + 1);
  communicator_->synchronize(stream_);
  barrier();
  events.record(stream_);
  for (int i = 0; i < calls; ++i) {
    forward();
    events.record(stream_);
    backward();
    events.record(stream_);
  }
  communicator_->synchronize(stream_);
  double of_forward = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(calls); ++i) of_forward += events.between(2 * i, 2 * i + 1);
  const double of_both = events.between(0, 2 * static_cast<std::size_t>(calls));
  return {greatest(of_forward / calls), greatest(of_both / calls), 1, calls};
}

Times Ranks::time(const Rounds& rounds, const std::function<void()>& forward, const std::function<void()>& backward) {
  std::vector<double> of_forward, of_both;
  double spent = 0;
  const auto keep = [&](const Times& times) {
    of_forward.push_back(times.forward);
    of_both.push_back(times.both);
    spent += times.both * times.calls / 1e3;
  };
  Times first = round(1, forward, backward);
  int calls = 1;
  if (first.both > 1e3 * rounds.seconds) {
    keep(first);
  } else {
    if (first.both < 1e3) first = round(1, forward, backward);
    calls = std::clamp(static_cast<int>(rounds.round_ms / first.both), 1, 50);
  }
  while (static_cast<int>(of_both.size()) < rounds.least ||
         (spent < rounds.seconds && static_cast<int>(of_both.size()) < rounds.most)) {
    keep(round(calls, forward, backward));
  }
  return {median(of_forward), median(of_both), static_cast<int>(of_both.size()), calls};
}

double Ranks::exchange_ms(const std::vector<fa::Communicator::Transfer>& transfers, int repeats) {
  const auto queue = [&] {
    if (!transfers.empty()) communicator_->wait(communicator_->exchange(transfers, stream_), stream_);
  };
  queue();
  std::vector<double> times;
  for (int i = 0; i < 3; ++i) {
    Events events(2);
    communicator_->synchronize(stream_);
    barrier();
    events.record(stream_);
    for (int j = 0; j < repeats; ++j) queue();
    events.record(stream_);
    communicator_->synchronize(stream_);
    times.push_back(greatest(events.between(0, 1) / repeats));
  }
  return median(times);
}

LinkSpeeds Ranks::link_speeds() {
  if (size() == 1) return {};
  const Memory sent(static_cast<std::size_t>(kLinkElements) * 2), received(static_cast<std::size_t>(kLinkElements) * 2);
  const int n = size(), me = communicator_->rank(), next = (me + 1) % n, previous = (me + n - 1) % n;
  const auto rate = [](double elements, double milliseconds) { return elements * 2 / milliseconds / 1e6; };
  using Transfers = std::vector<fa::Communicator::Transfer>;
  constexpr int kRepeats = 4;
  const Transfers ring{{true, next, sent.get(), kLinkElements, fa::DType::bf16},
                       {false, previous, received.get(), kLinkElements, fa::DType::bf16}};
  Transfers pairs;
  const bool sends = me % 2 == 0;
  if (sends && me + 1 < n) pairs.push_back(ring[0]);
  if (!sends) pairs.push_back(ring[1]);
  Transfers all, small;
  const std::int64_t part = kLinkElements / (n - 1);
  for (int peer = 0, i = 0; peer < n; ++peer) {
    if (peer == me) continue;
    all.push_back({true, peer, static_cast<std::uint16_t*>(sent.get()) + part * i, part, fa::DType::bf16});
    all.push_back({false, peer, static_cast<std::uint16_t*>(received.get()) + part * i, part, fa::DType::bf16});
    ++i;
  }
  for (fa::Communicator::Transfer transfer : ring) {
    transfer.count = 2;
    small.push_back(transfer);
  }
  LinkSpeeds speeds;
  speeds.one_way = rate(static_cast<double>(kLinkElements), exchange_ms(pairs, kRepeats));
  speeds.both_ways = rate(static_cast<double>(kLinkElements), exchange_ms(ring, kRepeats));
  speeds.all_to_all = rate(static_cast<double>(part * (n - 1)), exchange_ms(all, kRepeats));
  speeds.latency_us = 1e3 * exchange_ms(small, 50);
  return speeds;
}

}  // namespace bench
