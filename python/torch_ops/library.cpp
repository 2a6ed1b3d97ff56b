#include "library.hpp"

#include <array>
#include <cctype>
#include <deque>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <dlfcn.h>

namespace fa_torch {
namespace {

struct Hash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

/// Values by the bytes of what they were asked for. Never destroyed: a thread may call while the process ends.
template <class Value>
class Memo {
 public:
  template <class Make>
  Value get(std::string_view key, Make make) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = values_.find(key); found != values_.end()) return found->second;
    }
    Value made = make();
    const std::unique_lock lock(mutex_);
    return values_.try_emplace(std::string(key), std::move(made)).first->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::string, Value, Hash, std::equal_to<>> values_;
};

template <class Value>
void append(std::string& key, const Value& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append(std::string& key, const std::string& text) {
  append(key, text.size());
  key += text;
}

template <class Value>
void append(std::string& key, const std::optional<Value>& value) {
  append(key, value.has_value());
  if (value) append(key, *value);
}

void append(std::string& key, const std::vector<std::string>& texts) {
  append(key, texts.size());
  for (const std::string& text : texts) append(key, text);
}

Functions& functions() {
  static Functions found;
  return found;
}

/// The library to open when the first call is made by a graph that was exported, which calls nothing else of the
/// package.
std::string& later() {
  static std::string path;
  return path;
}

template <class Function>
void find(void* from, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(from, name));
  if (function == nullptr) throw std::runtime_error(std::string("libfa has no ") + name);
}

struct Interned {
  std::mutex mutex;
  std::unordered_map<std::string, std::int64_t> numbers;
  std::deque<Options> options;  // whose elements stay where they are
};

Interned& interned() {
  static auto* kept = new Interned;
  return *kept;
}

/// Whether `name` is one of the identifiers in `expression`.
bool names(const std::optional<std::string>& expression, const std::string& name) {
  if (!expression) return false;
  const auto part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  for (std::size_t at = 0; at < expression->size();) {
    std::size_t end = at;
    while (end < expression->size() && part((*expression)[end])) ++end;
    if (expression->compare(at, end - at, name) == 0) return true;
    at = end == at ? at + 1 : end;
  }
  return false;
}

/// A score or mask function, with the captures that it names.
struct Function {
  std::vector<fa_capture> captures;
  fa_function function = {};

  const fa_function* make(const std::optional<std::string>& expression, const Options& options,
                          const HandleOf& question) {
    if (!expression || expression->empty()) return nullptr;
    for (std::size_t n = 0; n < options.tensor_names.size(); ++n) {
      const std::string& name = options.tensor_names[n];
      const bool grad = !question.requires_grad.empty() && question.requires_grad[n];
      if (names(expression, name))
        captures.push_back({name.c_str(), fa_dtype_of(question.captures[n].dtype()), grad ? 1 : 0});
    }
    for (const std::string& name : options.number_names) {
      if (names(expression, name)) captures.push_back({name.c_str(), FA_F32, 0});
    }
    function.struct_size = sizeof function;
    function.expression = expression->c_str();
    function.captures = captures.data();
    function.capture_count = static_cast<std::uint32_t>(captures.size());
    return &function;
  }
};

fa_attention* create(const HandleOf& question) {
  const Options& options = options_of(question.options);
  for (std::size_t n = 0; n < question.requires_grad.size(); ++n) {
    if (question.requires_grad[n] && !names(options.score, options.tensor_names[n])) {
      throw std::invalid_argument("captures['" + options.tensor_names[n] +
                                  "'] requires a gradient: accepted is that of a capture "
                                  "of the score function; a mask has none");
    }
  }
  Function score, mask;
  fa_config config = {};
  config.struct_size = sizeof config;
  config.head_dim = static_cast<std::int32_t>(question.d_qk);
  config.head_dim_v = static_cast<std::int32_t>(question.d_v);
  config.dtype = question.dtype;
  config.has_scale = options.scale ? 1 : 0;
  config.scale = static_cast<float>(options.scale.value_or(0));
  config.causal = options.causal ? 1 : 0;
  config.causal_align = options.top_left ? FA_CAUSAL_TOP_LEFT : FA_CAUSAL_BOTTOM_RIGHT;
  config.deterministic = options.deterministic ? 1 : 0;
  config.varlen = config.zero_padding = options.varlen ? 1 : 0;
  config.dropout = static_cast<float>(options.dropout);
  config.sink = question.sink ? 1 : 0;
  config.score = score.make(options.score, options, question);
  config.mask = mask.make(options.mask, options, question);
  config.has_window_left = options.window_left ? 1 : 0;
  config.window_left = options.window_left.value_or(0);
  config.has_window_right = options.window_right ? 1 : 0;
  config.window_right = options.window_right.value_or(0);
  config.chunk = options.chunk;
  fa_device device = {FA_DEVICE_HOST, 0};
  if (!question.place.is_host()) device = {FA_DEVICE_CUDA, question.place.index};
  fa_attention* attention = nullptr;
  check_status(library().create(&config, device, &attention));
  return attention;
}

/// Of a PyTorch with CUDA; its library is not one that this one can be linked to.
auto current_cuda_stream() {
  using Get = AOTITorchError (*)(std::int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library != nullptr ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (found == nullptr) throw std::runtime_error("this PyTorch has no CUDA");
    return reinterpret_cast<Get>(found);
  }();
  return get;
}

}  // namespace

void open_later(const std::string& path) {
  later() = path;
}

void open(const std::string& path) {
  void* from = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (from == nullptr) throw std::runtime_error(dlerror());
  Functions found;
  find(from, "fa_create", found.create);
  find(from, "fa_forward", found.forward);
  find(from, "fa_backward", found.backward);
  find(from, "fa_workspace_size", found.workspace_size);
  find(from, "fa_backward_workspace_size", found.backward_workspace_size);
  find(from, "fa_last_error_message", found.last_error_message);
  if (functions().create != nullptr && functions().create != found.create) {
    throw std::runtime_error("operators were called before " + path + " was opened, and have opened " + later());
  }
  functions() = found;
}

const Functions& library() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (functions().create != nullptr) return;
    if (later().empty()) throw std::runtime_error("libfa is not opened: fa_attention.load opens it");
    open(later());
  });
  return functions();
}

void check_status(int status) {
  if (status == FA_OK) return;
  if (status == FA_INVALID_ARGUMENT) throw std::invalid_argument(library().last_error_message());
  throw std::runtime_error(library().last_error_message());
}

std::int64_t number_of(const Options& options) {
  std::string key;
  key.reserve(160);  // of options without texts
  append(key, std::array{options.causal, options.top_left, options.deterministic, options.varlen});
  append(key, options.scale);
  append(key, options.window_left);
  append(key, options.window_right);
  append(key, options.chunk);
  append(key, options.dropout);
  append(key, options.score);
  append(key, options.mask);
  append(key, options.tensor_names);
  append(key, options.number_names);
  Interned& all = interned();
  const std::lock_guard lock(all.mutex);
  const auto [found, added] = all.numbers.try_emplace(key, static_cast<std::int64_t>(all.options.size()));
  if (added) all.options.push_back(options);
  return found->second;
}

const Options& options_of(std::int64_t number) {
  Interned& all = interned();
  const std::lock_guard lock(all.mutex);
  if (number < 0 || number >= static_cast<std::int64_t>(all.options.size())) {
    throw std::invalid_argument("options = " + std::to_string(number) +
                                ": accepted is a number that _options has returned");
  }
  return all.options[static_cast<std::size_t>(number)];
}

const fa_attention* attention_of(const HandleOf& question) {
  static auto* handles = new Memo<fa_attention*>;
  std::array<char, 512> room;
  std::size_t used = 0;
  const auto add = [&](std::int64_t value) {
    if (used + sizeof value > room.size()) throw std::invalid_argument("captures: accepted are at most 50");
    std::copy_n(reinterpret_cast<const char*>(&value), sizeof value, room.data() + used);
    used += sizeof value;
  };
  add(question.options);
  add(question.place.type * 4096 + question.place.index);
  add(question.dtype * 2 + (question.sink ? 1 : 0));
  add(question.d_qk);
  add(question.d_v);
  for (std::size_t n = 0; n < question.captures.size(); ++n) {
    const bool grad = !question.requires_grad.empty() && question.requires_grad[n];
    add(question.captures[n].dtype() * 2 + (grad ? 1 : 0));
  }
  return handles->get({room.data(), used}, [&] { return create(question); });
}

std::size_t scratch_size(const fa_attention* attention, const fa_shape& shape, bool backward) {
  static auto* sizes = new Memo<std::size_t>;
  struct {
    const fa_attention* attention;
    fa_shape shape;
    std::int64_t backward;
  } const key = {attention, shape, backward ? 1 : 0};
  return sizes->get({reinterpret_cast<const char*>(&key), sizeof key}, [&] {
    std::size_t size = 0;
    const auto ask = backward ? library().backward_workspace_size : library().workspace_size;
    check_status(ask(attention, &shape, &size));
    return size;
  });
}

Stream::Stream(Place place) {
  if (place.is_host()) return;
  std::int32_t current = 0;
  check(aoti_torch_get_current_device_index(&current), "aoti_torch_get_current_device_index");
  if (current != place.index)
    check(aoti_torch_create_device_guard(place.index, &guard_), "aoti_torch_create_device_guard");
  check(current_cuda_stream()(place.index, &stream_), "aoti_torch_get_current_cuda_stream");
}

Stream::~Stream() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

}  // namespace fa_torch
