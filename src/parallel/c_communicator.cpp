#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/c_api.hpp"

namespace fa::parallel::c {
namespace {

/// A transport of the program's.
class Given final : public Communicator {
 public:
  explicit Given(const fa_communicator_functions& functions)
      : functions_(functions), device_(to_device(functions.device, "functions.device")) {}
  ~Given() override {
    if (functions_.destroy != nullptr) functions_.destroy(functions_.user);
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  int rank() const noexcept override { return functions_.rank; }
  int size() const noexcept override { return functions_.size; }
  Device device() const noexcept override { return device_; }
  std::uint64_t exchange(std::span<const Transfer> group, Stream stream) override {
    std::vector<fa_transfer> transfers;
    for (const Transfer& transfer : group) {
      transfers.push_back({transfer.sends ? 1 : 0, transfer.peer, static_cast<std::int32_t>(transfer.dtype), 0,
                           transfer.data, transfer.count});
    }
    std::uint64_t number = 0;
    check(functions_.exchange(functions_.user, transfers.data(), transfers.size(), stream, &number), "exchange");
    return number;
  }
  void wait(std::uint64_t group, Stream stream) override {
    check(functions_.wait(functions_.user, group, stream), "wait");
  }
  void synchronize(Stream stream) override { check(functions_.synchronize(functions_.user, stream), "synchronize"); }
  void check() override { check(functions_.check(functions_.user), "check"); }
  void abort(const std::string& problem) noexcept override { functions_.abort(functions_.user, problem.c_str()); }

 private:
  static void check(int status, const char* function) {
    if (status == FA_OK) return;
    const std::string problem = std::string(function) + " of the program returned " + std::to_string(status) + " (" +
                                fa_status_name(status) + ")";
    throw Error(ErrorCode::cuda, "communication of the group has failed: " + problem, {{"problem", problem}});
  }

  fa_communicator_functions functions_;
  Device device_;
};

fa_communicator_functions checked(const fa_communicator_functions* source) {
  const fa_communicator_functions in = read_struct(source, "functions");
  if (in.size < 1) throw_invalid("functions.size", in.size, "1 and more");
  if (in.rank < 0 || in.rank >= in.size) {
    throw_invalid("functions.rank", in.rank, "0 to " + std::to_string(in.size - 1));
  }
  const std::pair<bool, const char*> needed[] = {{in.exchange != nullptr, "functions.exchange"},
                                                 {in.wait != nullptr, "functions.wait"},
                                                 {in.synchronize != nullptr, "functions.synchronize"},
                                                 {in.check != nullptr, "functions.check"},
                                                 {in.abort != nullptr, "functions.abort"}};
  for (const auto& [given, name] : needed) {
    if (!given) throw_invalid(name, "NULL", "a function");
  }
  return in;
}

std::vector<Communicator::Transfer> to_transfers(const fa_transfer* transfers, std::uint64_t count, int size) {
  if (count > 0) require(transfers, "transfers");
  std::vector<Communicator::Transfer> all;
  for (std::uint64_t i = 0; i < count; ++i) {
    const fa_transfer& in = transfers[i];
    const std::string name = "transfers[" + std::to_string(i) + "]";
    if (in.peer < 0 || in.peer >= size) throw_invalid(name + ".peer", in.peer, "0 to " + std::to_string(size - 1));
    if (in.count < 0) throw_invalid(name + ".count", in.count, "0 and more");
    if (in.count > 0 && in.data == nullptr) throw_invalid(name + ".data", "NULL", "memory of the elements");
    const DType dtype = to_enum(in.dtype, DType::u4x2, name + ".dtype");
    all.push_back({in.sends != 0, in.peer, in.data, in.count, dtype});
  }
  return all;
}

LocalGroupOptions to_options(const fa_local_group_options* source) {
  LocalGroupOptions options;
  if (source == nullptr) return options;
  const fa_local_group_options in = read_struct(source, "options");
  if (in.timeout_ms != 0) options.timeout = std::chrono::milliseconds(in.timeout_ms);
  if (in.max_delay_us < 0) throw_invalid("options.max_delay_us", in.max_delay_us, "0 and more");
  options.seed = in.seed;
  options.shares_memory = in.shares_memory != 0;
  options.max_delay = std::chrono::microseconds(in.max_delay_us);
  if (in.on_exchange != nullptr) {
    options.on_exchange = [hear = in.on_exchange, user = in.user](int rank, std::uint64_t group) {
      const int status = hear(user, rank, group);
      if (status == FA_OK) return;
      throw Error(ErrorCode::cuda, "on_exchange of the program returned " + std::to_string(status) + " for rank " +
                                       std::to_string(rank) + ", group " + std::to_string(group));
    };
  }
  return options;
}

void make_group(int size, const LocalGroupOptions& options, fa_communicator** out) {
  require(out, "out");
  const auto group = make_local_group(size, options);
  std::vector<std::unique_ptr<fa_communicator>> made;
  for (const auto& one : group) made.push_back(std::make_unique<fa_communicator>(fa_communicator{one}));
  for (std::size_t i = 0; i < made.size(); ++i) out[i] = made[i].release();
}

}  // namespace
}  // namespace fa::parallel::c

namespace c = fa::parallel::c;

extern "C" {

int fa_communicator_of_nccl(void* comm, const fa_nccl_options* options, fa_communicator** out) {
  return c::guarded([&] {
    c::require(out, "out");
    *out = nullptr;
    fa::NcclOptions given;
    if (options != nullptr) {
      const fa_nccl_options in = c::read_struct(options, "options");
      if (in.timeout_ms != 0) given.timeout = std::chrono::milliseconds(in.timeout_ms);
      given.watch = in.without_watch == 0;
      given.transfers = c::to_enum(in.transfers, fa::NcclTransfers::puts, "options.transfers");
    }
    *out = new fa_communicator{fa::use_nccl(static_cast<ncclComm*>(comm), given)};
  });
}

int fa_communicator_local_group(int32_t size, int64_t timeout_ms, fa_communicator** out) {
  return c::guarded([&] {
    fa::LocalGroupOptions options;
    if (timeout_ms != 0) options.timeout = std::chrono::milliseconds(timeout_ms);
    c::make_group(size, options, out);
  });
}

void fa_communicator_destroy(fa_communicator* communicator) {
  delete communicator;
}

int fa_communicator_rank(const fa_communicator* communicator, int32_t* rank, int32_t* size) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    if (rank != nullptr) *rank = communicator->communicator->rank();
    if (size != nullptr) *size = communicator->communicator->size();
  });
}

int fa_communicator_synchronize(fa_communicator* communicator, void* stream) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    communicator->communicator->synchronize(static_cast<fa::Stream>(stream));
  });
}

int fa_communicator_check(fa_communicator* communicator) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    communicator->communicator->check();
  });
}

int fa_communicator_abort(fa_communicator* communicator, const char* problem) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    communicator->communicator->abort(problem == nullptr ? "unknown" : problem);
  });
}

int fa_communicator_local_group_of(int32_t size, const fa_local_group_options* options, fa_communicator** out) {
  return c::guarded([&] { c::make_group(size, c::to_options(options), out); });
}

int fa_communicator_create(const fa_communicator_functions* functions, fa_communicator** out) {
  return c::guarded([&] {
    c::require(out, "out");
    *out = nullptr;
    *out = new fa_communicator{std::make_shared<c::Given>(c::checked(functions))};
  });
}

int fa_communicator_device(const fa_communicator* communicator, fa_device* device) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    c::require(device, "device");
    const fa::Device of = communicator->communicator->device();
    const bool is_host = of.kind() == fa::Device::Kind::host;
    *device = {is_host ? FA_DEVICE_HOST : FA_DEVICE_CUDA, is_host ? 0 : of.ordinal()};
  });
}

int fa_communicator_exchange(fa_communicator* communicator, const fa_transfer* transfers, uint64_t count, void* stream,
                             uint64_t* group) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    fa::Communicator& one = *communicator->communicator;
    const std::uint64_t number =
        one.exchange(c::to_transfers(transfers, count, one.size()), static_cast<fa::Stream>(stream));
    if (group != nullptr) *group = number;
  });
}

int fa_communicator_wait(fa_communicator* communicator, uint64_t group, void* stream) {
  return c::guarded([&] {
    c::require(communicator, "communicator");
    communicator->communicator->wait(group, static_cast<fa::Stream>(stream));
  });
}

}  // extern "C"
