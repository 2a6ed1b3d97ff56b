#include "fuzz/c_abi/case.hpp"

#include <cstring>
#include <memory>
#include <stdexcept>

#include <fa/fa.h>

#include "fuzz/c_abi/arguments.hpp"
#include "fuzz/c_abi/memory.hpp"
#include "fuzz/random.hpp"

namespace fa::fuzz {
namespace {

void on_log(void*, int, const char* message) {
  if (std::strlen(message) == 0) throw std::runtime_error("an empty message");
}

class Case {
 public:
  Case(std::uint64_t seed, std::uint64_t index, Tally* tally)
      : random_(seed, index), memory_(random_), tally_(*tally), arguments_(random_, memory_, mischief()) {}

  void run() {
    switch (random_.below(20)) {
      case 0:
        return without_attention();
      case 1:
        return dropout_mask();
      case 2:
      case 3:
        return find();
      case 4:
        return texts();
      default:
        return with_attention();
    }
  }

 private:
  std::uint64_t mischief() {
    constexpr std::uint64_t kMischief[] = {0, 300, 100, 100, 30, 6};
    return random_.pick(kMischief);
  }

  [[noreturn]] static void fail(const char* function, const std::string& what) {
    throw std::runtime_error(std::string(function) + ": " + what + "; last error: " + fa_last_error_message());
  }

  /// Holds what a call returned to its contract.
  int check(const char* function, int status) {
    const bool untouched = memory_.outputs_untouched();
    memory_.clear();  // nothing of a call's arguments may be kept
    ++tally_.calls;
    ++tally_.outcomes[function][status];
    if (status < FA_OK || status > FA_NOT_FINITE) fail(function, "status " + std::to_string(status));
    if (status == FA_INTERNAL) fail(function, "a broken invariant of the library");
    if (status == FA_OK) {
      if (arguments_.must_fail()) fail(function, "accepted what it must refuse");
      arguments_.forget();
      return status;
    }
    arguments_.forget();
    if (fa_last_error_code() != status) fail(function, "another code as the last error");
    locate(function, status);
    if (std::strlen(fa_last_error_message()) == 0) fail(function, "no message");
    for (const char* const field : {"argument", "value", "accepted"}) {
      const bool given = std::strlen(fa_last_error_field(field)) != 0;
      if (status == FA_INVALID_ARGUMENT && !given && std::strcmp(field, "value") != 0)
        fail(function, "a field is missing");
    }
    if (status == FA_INVALID_ARGUMENT && !untouched) fail(function, "wrote, and then refused");
    return status;
  }

  /// Where the last failure met a NaN, which it says of no other.
  void locate(const char* function, int status) {
    fa_error_location location{};
    location.struct_size = sizeof location;
    const bool given = fa_last_error_location(&location) == FA_OK;
    if (given != (status == FA_NOT_FINITE)) fail(function, "a location, and another failure");
    if (given && (std::strlen(location.tensor) == 0 || std::strlen(location.result) == 0)) {
      fail(function, "a location without a name");
    }
    if (fa_last_error_location(nullptr) == FA_OK) fail("fa_last_error_location", "NULL accepted");
    if (fa_last_error_code() != status) fail("fa_last_error_location", "changed the last failure");
  }

  void with_attention() {
    const bool host = !random_.one_in(16);
    const GivenConfig config = arguments_.config(host);
    const fa_device device = arguments_.device(host);
    auto* attention = reinterpret_cast<fa_attention*>(std::uintptr_t{1});
    const int status = check("fa_create", fa_create(config.config, device, &attention));
    const std::unique_ptr<fa_attention, decltype(&fa_destroy)> owner(attention, fa_destroy);
    if ((status == FA_OK) != (attention != nullptr)) fail("fa_create", "attention and status do not agree");
    // The memory of other devices is not ours to give.
    const bool usable = attention != nullptr && device.kind == FA_DEVICE_HOST;
    for (std::uint64_t calls = usable ? 1 + random_.below(6) : 0; calls > 0; --calls) call(attention, config);
    ++tally_.calls;  // fa_destroy
  }

  void call(const fa_attention* attention, const GivenConfig& config) {
    const std::uint64_t which = random_.below(31);
    if (which >= 29 || (fuzz::is_fp8(config.seen) && random_.one_in(4))) return quantize(attention, config);
    if (which >= 25) return merge(attention, config);
    if (which >= 20) return append(attention, config);
    if (which < 7) return forward(attention, config);
    if (which < 13) return backward(attention, config);
    if (which == 13) return random_.one_in(2) ? counters(attention) : schedule(attention, config);
    if (which < 16) return kernel_info(attention, config);
    if (which < 18) return sizes(attention, config);
    if (random_.one_in(3)) {
      background(attention, config);
    } else if (random_.one_in(2)) {
      check("fa_prepare", fa_prepare(attention, arguments_.shape(config)));
    } else {
      check("fa_prepare_backward", fa_prepare_backward(attention, arguments_.shape(config)));
    }
  }

  void background(const fa_attention* attention, const GivenConfig& config) {
    std::int32_t ready = -1;
    const fa_shape* const shape = arguments_.shape(config);
    const auto expect_ready = [&](const char* function, int status) {
      if (check(function, status) == FA_OK && ready != 1) fail(function, "the host device is not ready");
    };
    switch (random_.below(4)) {
      case 0:
        return expect_ready("fa_is_ready", fa_is_ready(attention, shape, &ready));
      case 1:
        return expect_ready("fa_backward_is_ready", fa_backward_is_ready(attention, shape, &ready));
      case 2:
        check("fa_prepare_async", fa_prepare_async(attention, shape));
        return;
      default:
        check("fa_prepare_backward_async", fa_prepare_backward_async(attention, shape));
    }
  }

  void forward(const fa_attention* attention, const GivenConfig& config) {
    const ForwardArguments given = arguments_.forward(config);
    check("fa_forward",
          fa_forward(attention, given.inputs, given.outputs, arguments_.stream(), arguments_.workspace()));
  }

  void backward(const fa_attention* attention, const GivenConfig& config) {
    const BackwardArguments given = arguments_.backward(config);
    check("fa_backward",
          fa_backward(attention, given.inputs, given.outputs, arguments_.stream(), arguments_.workspace()));
  }

  void append(const fa_attention* attention, const GivenConfig& config) {
    switch (random_.below(8)) {
      case 0:
        check("fa_prepare_append", fa_prepare_append(attention, arguments_.append_shape(config)));
        return;
      case 1: {
        fa_kernel_info* const info = arguments_.filled<fa_kernel_info>();
        check("fa_append_kernel_info_get", fa_append_kernel_info_get(attention, arguments_.append_shape(config), info));
        return;
      }
      default:
        check("fa_append", fa_append(attention, arguments_.append(config), arguments_.stream()));
    }
  }

  void schedule(const fa_attention* attention, const GivenConfig& config) {
    check("fa_schedule",
          fa_schedule(attention, arguments_.schedule_inputs(config), arguments_.schedule(), arguments_.stream()));
  }

  void quantize(const fa_attention* attention, const GivenConfig& config) {
    if (random_.one_in(8)) {
      check("fa_prepare_quantize", fa_prepare_quantize(attention, arguments_.quantize(config)));
    } else {
      check("fa_quantize", fa_quantize(attention, arguments_.quantize(config), arguments_.stream()));
    }
  }

  void merge(const fa_attention* attention, const GivenConfig& config) {
    switch (random_.below(8)) {
      case 0:
        check("fa_prepare_merge", fa_prepare_merge(attention, arguments_.merge_shape(config)));
        return;
      case 1: {
        fa_kernel_info* const info = arguments_.filled<fa_kernel_info>();
        check("fa_merge_kernel_info_get", fa_merge_kernel_info_get(attention, arguments_.merge_shape(config), info));
        return;
      }
      default: {
        const MergeArguments given = arguments_.merge(config);
        check("fa_merge", fa_merge(attention, given.inputs, given.outputs, arguments_.stream()));
      }
    }
  }

  void counters(const fa_attention* attention) {
    check("fa_cache_counters_get", fa_cache_counters_get(attention, arguments_.filled<fa_cache_counters>()));
  }

  void kernel_info(const fa_attention* attention, const GivenConfig& config) {
    fa_kernel_info* const info = arguments_.filled<fa_kernel_info>();
    const fa_shape* const shape = arguments_.shape(config);
    if (random_.one_in(2)) {
      check("fa_kernel_info_get", fa_kernel_info_get(attention, shape, info));
    } else {
      check("fa_backward_kernel_info_get", fa_backward_kernel_info_get(attention, shape, info));
    }
  }

  void shared_sizes(const fa_attention* attention, const GivenConfig& config, size_t* size) {
    std::uint64_t count = 0;
    const fa_shared_prefix_shape* const levels = arguments_.prefix_shapes(&count);
    const fa_shape* const shape = arguments_.shape(config);
    if (random_.one_in(2)) {
      check("fa_prepare_shared", fa_prepare_shared(attention, shape, levels, count));
    } else {
      check("fa_shared_workspace_size", fa_shared_workspace_size(attention, shape, levels, count, size));
    }
  }

  void sizes(const fa_attention* attention, const GivenConfig& config) {
    struct Query {
      const char* name;
      int (*function)(const fa_attention*, const fa_shape*, size_t*);
    };
    constexpr Query kQueries[] = {{"fa_workspace_size", fa_workspace_size},
                                  {"fa_backward_workspace_size", fa_backward_workspace_size},
                                  {"fa_mask_tiles_size", fa_mask_tiles_size},
                                  {"fa_schedule_size", fa_schedule_size},
                                  {"fa_backward_mask_tiles_size", fa_backward_mask_tiles_size}};
    const Query query = random_.pick(kQueries);
    auto* const size = reinterpret_cast<size_t*>(memory_.block(sizeof(size_t)));
    if (random_.one_in(config.seen.page_size > 0 ? 2 : 5)) return shared_sizes(attention, config, size);
    check(query.name, query.function(attention, arguments_.shape(config), arguments_.bad() ? nullptr : size));
  }

  void without_attention() {
    GivenConfig config = arguments_.config(true);
    fa_destroy(nullptr);
    check("fa_create", fa_create(config.config, arguments_.device(true), nullptr));
    arguments_.forget();
    call(nullptr, config);
  }

  void find() {
    const GivenConfig config = arguments_.config(false);
    const fa_shape* const shape = arguments_.shape(config);
    fa_kernel_info* const info = random_.one_in(3) ? nullptr : arguments_.filled<fa_kernel_info>();
    if (random_.one_in(4)) {
      check("fa_find_append_kernel",
            fa_find_append_kernel(config.config, arguments_.append_shape(config), arguments_.arch(), info));
    } else if (random_.one_in(4)) {
      check("fa_find_merge_kernel",
            fa_find_merge_kernel(config.config, arguments_.merge_shape(config), arguments_.arch(), info));
    } else if (random_.one_in(2)) {
      check("fa_find_kernel", fa_find_kernel(config.config, shape, arguments_.arch(), info));
    } else {
      check("fa_find_backward_kernel", fa_find_backward_kernel(config.config, shape, arguments_.arch(), info));
    }
    static_cast<void>(fa_last_error_field("command"));
  }

  void dropout_mask() {
    std::int64_t sizes[] = {random_.between(0, 3), random_.between(0, 3), random_.between(0, 70),
                            random_.between(0, 70)};
    for (std::int64_t& size : sizes) {
      if (arguments_.bad()) size = random_.wild();
    }
    double bytes = 1;
    bool negative = false;
    for (const std::int64_t size : sizes) {
      negative = negative || size < 0;
      bytes *= size < 0 ? 1 : static_cast<double>(size);
    }
    // No mask of that size is in memory: the library has to refuse it or its pointer.
    const bool too_large = bytes > (1 << 20);
    std::uint8_t* const keep = too_large || arguments_.bad() || negative
                                   ? nullptr
                                   : reinterpret_cast<std::uint8_t*>(memory_.block(static_cast<std::size_t>(bytes)));
    const float probability = random_.one_in(8) ? random_.pick({-1.0F, 1.0F, 2.0F, 1e30F, 0.99999F, 1e-9F}) : 0.3F;
    check("fa_dropout_mask",
          fa_dropout_mask(arguments_.dropout(), probability, sizes[0], sizes[1], sizes[2], sizes[3], keep));
  }

  void texts() {
    tally_.calls += 8;
    if (std::strlen(fa_version()) == 0) fail("fa_version", "empty");
    if (std::strlen(fa_status_name(random_.wild32())) == 0) fail("fa_status_name", "empty");
    static_cast<void>(fa_last_error_code());
    static_cast<void>(std::strlen(fa_last_error_message()));
    const std::string name = hostile_text(random_);
    static_cast<void>(std::strlen(fa_last_error_field(random_.one_in(4) ? nullptr : name.c_str())));
    if (fa_set_log_callback(on_log, nullptr) != FA_OK) fail("fa_set_log_callback", "refused");
    check("fa_set_log_level", fa_set_log_level(random_.one_in(2) ? FA_LOG_WARNING : random_.wild32()));
    if (fa_set_log_level(FA_LOG_ERROR) != FA_OK) fail("fa_set_log_level", "refused");
    if (fa_set_nvrtc_path(name.c_str()) != FA_OK) fail("fa_set_nvrtc_path", "refused");
    if (fa_set_nvrtc_path(nullptr) != FA_OK) fail("fa_set_nvrtc_path", "NULL refused");
  }

  Random random_;
  Memory memory_;
  Tally& tally_;
  Arguments arguments_;
};

}  // namespace

void run_case(std::uint64_t seed, std::uint64_t index, Tally* tally) {
  Case(seed, index, tally).run();
}

}  // namespace fa::fuzz
