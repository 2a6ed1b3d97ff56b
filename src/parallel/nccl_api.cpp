#include "parallel/nccl_api.hpp"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include <fa/error.hpp>

#include "support/dynamic_library.hpp"

namespace fa::parallel {
namespace {

using support::DynamicLibrary;

constexpr const char* kSoname = "libnccl.so.2";
constexpr int kOldest = 21800;

std::mutex g_mutex;
std::atomic<const Nccl*> g_nccl{nullptr};

[[noreturn]] void throw_missing(const std::string& problem) {
  const std::string remedy =
      "install NCCL 2.18 or later (libnccl2, or the wheel nvidia-nccl-cu13), or name the file in FA_NCCL_PATH";
  throw Error(ErrorCode::unsupported, "NCCL cannot be used: " + problem + "; " + remedy,
              {{"problem", problem}, {"remedy", remedy}});
}

DynamicLibrary open_library() {
  std::string problem;
  const char* const given = std::getenv("FA_NCCL_PATH");
  if (given != nullptr && *given != '\0') {
    DynamicLibrary library = DynamicLibrary::open(given, &problem);
    if (!library) throw_missing(problem);
    return library;
  }
  if (DynamicLibrary loaded = DynamicLibrary::open_loaded(kSoname)) return loaded;
  DynamicLibrary library = DynamicLibrary::open(kSoname, &problem);
  if (!library) throw_missing(problem);
  return library;
}

std::unique_ptr<Nccl> resolve(const DynamicLibrary& library) {
  auto api = std::make_unique<Nccl>();
  api->path = library.path();
  const auto find = [&](const char* name, auto& function) {
    function = library.function<std::remove_reference_t<decltype(function)>>(name);
    if (function == nullptr) throw_missing(api->path + " has no function " + name);
  };
  find("ncclGetVersion", api->get_version);
  if (api->get_version(&api->version) != Nccl::kSuccess || api->version < kOldest) {
    throw_missing(api->path + " is NCCL " + std::to_string(api->version / 10000) + "." +
                  std::to_string(api->version / 100 % 100) + ", at least 2.18 is needed");
  }
  find("ncclGetErrorString", api->error_string);
  find("ncclGetLastError", api->last_error);
  find("ncclCommCount", api->comm_count);
  find("ncclCommUserRank", api->comm_rank);
  find("ncclCommCuDevice", api->comm_device);
  find("ncclCommGetAsyncError", api->comm_async_error);
  find("ncclCommAbort", api->comm_abort);
  find("ncclGroupStart", api->group_start);
  find("ncclGroupEnd", api->group_end);
  find("ncclSend", api->send);
  find("ncclRecv", api->receive);
  if (api->version < Nccl::kHasPuts) return api;
  find("ncclCommQueryProperties", api->query_properties);
  find("ncclMemAlloc", api->allocate);
  find("ncclMemFree", api->free);
  find("ncclCommWindowRegister", api->register_window);
  find("ncclCommWindowDeregister", api->deregister_window);
  find("ncclPutSignal", api->put);
  api->has_puts = true;
  return api;
}

}  // namespace

const Nccl& nccl() {
  if (const Nccl* ready = g_nccl.load(std::memory_order_acquire)) return *ready;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (const Nccl* ready = g_nccl.load(std::memory_order_acquire)) return *ready;
  DynamicLibrary library = open_library();
  std::unique_ptr<Nccl> api = resolve(library);
  library.keep_loaded();
  g_nccl.store(api.get(), std::memory_order_release);
  return *api.release();  // for the life of the process, as its communicators are
}

std::string nccl_text(int result, Nccl::Comm comm) {
  std::string text = nccl().error_string(result);
  const char* const last = comm == nullptr ? nullptr : nccl().last_error(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

void nccl_check(int result, const char* call, Nccl::Comm comm) {
  if (result == Nccl::kSuccess) return;
  throw Error(ErrorCode::cuda, std::string(call) + " failed with " + nccl_text(result, comm),
              {{"call", call}, {"result", std::to_string(result)}});
}

}  // namespace fa::parallel
