#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fa/error.hpp>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "fake_driver/launches_test.hpp"
#include "fake_driver/random_calls.hpp"

// What calls queue stays what it was: kernels, grids, starts, what is cleared, and every parameter. transcripts.txt has
// two digests a seed, of the launches and of their parameters. A change that means to change them commits the file that
// FA_UPDATE_TRANSCRIPTS=1 writes; FA_TRANSCRIPTS=PATH writes the whole text there, to be compared with another tree's,
// and FA_TRANSCRIPTS_SPILL=1 lets kernels spill, so that alternatives are taken, too.
namespace fa {
namespace {

constexpr unsigned kSeeds = 300;
constexpr unsigned kPagedSeeds = 60;  // behind those
constexpr unsigned kSomeSeeds = 60;   // of backwards some of whose gradients are not wanted
constexpr unsigned kAllSeeds = kSeeds + kPagedSeeds + kSomeSeeds;
constexpr int kCallsPerSeed = 4;
void* const kMemory = reinterpret_cast<void*>(std::uintptr_t{1} << 60);
void* const kTileMemory = reinterpret_cast<void*>(std::uintptr_t{3} << 59);

std::uint64_t digest_of(const std::string& text) {
  std::uint64_t digest = 0xcbf29ce484222325u;
  for (const char c : text) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return digest;
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

/// What was queued, and apart from that what with.
struct Transcript {
  std::string launches;
  std::string params;

  std::string digests() const { return hex(digest_of(launches)) + " " + hex(digest_of(params)); }
};

class Transcripts : public LaunchesTest {
 protected:
  /// One call, or why it is refused.
  void call(Transcript* transcript, const std::string& name, const std::function<void()>& call) {
    launches_().clear();
    transcript->launches += name;
    try {
      call();
    } catch (const Error& error) {
      transcript->launches += std::string(" refused: ") + to_string(error.code()) + " ";
      transcript->launches += error.field("argument");
    }
    for (const fake_driver::Launch& launch : launches_()) {
      transcript->launches += std::string(launch.early ? " +" : " ") + launch.kernel;
      if (launch.grid == 0) {
        transcript->launches += "@" + hex(launch.address) + ":" + std::to_string(launch.bytes);
        continue;
      }
      transcript->launches += " " + std::to_string(launch.grid) + "x" + std::to_string(launch.threads) + "+" +
                              std::to_string(launch.shared_bytes);
      transcript->params += name + " " + launch.kernel + " " + hex(launch.params) + "\n";
      EXPECT_NE(launch.params, 0U) << launch.kernel << ": its parameters are not known to the fake driver";
    }
    transcript->launches += "\n";
  }

  /// Twice, so that the second call may find tiles listed.
  void forward(Transcript* transcript, const Attention& attention, const RandomCalls::Call& call_of, bool own_memory,
               bool shares_tiles) {
    for (const bool filled : {false, true}) {
      call(transcript, "forward", [&] {
        ForwardInputs inputs = call_of.inputs;
        const std::size_t tiles = attention.mask_tiles_size(call_of.forward_shape);
        if (shares_tiles) inputs.tiles = {kTileMemory, tiles, filled};
        const std::size_t bytes = attention.workspace_size(call_of.forward_shape);
        transcript->launches += " " + std::to_string(bytes) + "/" + std::to_string(tiles);
        attention.forward(inputs, call_of.outputs, nullptr, own_memory ? Workspace{} : Workspace{kMemory, bytes});
      });
    }
  }

  /// With a schedule, where calls take one.
  void scheduled(Transcript* transcript, const Attention& attention, const RandomCalls::Call& call_of) {
    ForwardInputs inputs = call_of.inputs;
    call(transcript, "schedule", [&] {
      inputs.schedule = {kTileMemory, attention.schedule_size(call_of.forward_shape)};
      transcript->launches += " " + std::to_string(inputs.schedule.size);
      attention.schedule({call_of.forward_shape, inputs.sequences, inputs.cache.seq_begin}, inputs.schedule);
    });
    call(transcript, "scheduled", [&] {
      const std::size_t bytes = attention.workspace_size(call_of.forward_shape);
      attention.forward(inputs, call_of.outputs, nullptr, {kMemory, bytes});
    });
  }

  void backward(Transcript* transcript, const Attention& attention, const RandomCalls::Call& call_of, bool own_memory,
                bool shares_tiles) {
    for (const bool filled : {false, true}) {
      call(transcript, "backward", [&] {
        BackwardInputs inputs = call_of.backward_inputs;
        const std::size_t tiles = attention.backward_mask_tiles_size(call_of.backward_shape);
        if (shares_tiles) inputs.tiles = {kTileMemory, tiles, filled};
        const std::size_t bytes = attention.backward_workspace_size(call_of.backward_shape);
        transcript->launches += " " + std::to_string(bytes) + "/" + std::to_string(tiles);
        attention.backward(inputs, call_of.backward_outputs, nullptr,
                           own_memory ? Workspace{} : Workspace{kMemory, bytes});
      });
    }
  }

  /// Of dq, dk and dv those whose bits are set.
  static void leave_out(RandomCalls::Call* call, unsigned bits) {
    const auto leave_out = [](TensorView* output, bool* wanted) {
      *output = {};
      *wanted = false;
    };
    BackwardOutputs& outputs = call->backward_outputs;
    Gradients& gradients = call->backward_shape.gradients;
    if ((bits & 1) != 0) leave_out(&outputs.dq, &gradients.dq);
    if ((bits & 2) != 0) leave_out(&outputs.dk, &gradients.dk);
    if ((bits & 4) != 0) leave_out(&outputs.dv, &gradients.dv);
  }

  Transcript of_seed(unsigned seed) {
    RandomCalls random(seed, seed % 2 == 1);
    const bool some_gradients = seed >= kSeeds + kPagedSeeds;
    const bool paged = seed >= kSeeds && !some_gradients;
    AttentionConfig config = paged ? random.paged_config() : random.config();
    config.tune = config_.tune;
    config.cache = config_.cache;
    Transcript transcript;
    std::optional<Attention> attention;
    call(&transcript, "create", [&] { attention.emplace(Attention::create(config)); });
    for (int i = 0; attention && i < kCallsPerSeed; ++i) {
      RandomCalls::Call call = random.call(config, random.shape(config));
      const bool shares_tiles = !config.mask.expression.empty() && random.one_in(2);
      transcript.launches += text_of(config, call.forward_shape) + "\n";
      if (some_gradients) {
        leave_out(&call, 1 + (seed + static_cast<unsigned>(i)) % 7);
        backward(&transcript, *attention, call, i % 2 == 1, shares_tiles);
        continue;
      }
      forward(&transcript, *attention, call, i % 2 == 1, shares_tiles && !paged);
      if (paged) scheduled(&transcript, *attention, call);
      if (paged) continue;
      backward(&transcript, *attention, call, i % 2 == 1, shares_tiles);
    }
    return transcript;
  }
};

TEST_F(Transcripts, AreThoseOfBefore) {
  setenv("FA_FAKE_NVRTC_SPILLS", std::getenv("FA_TRANSCRIPTS_SPILL") == nullptr ? "0" : "1", 1);
  const char* const whole = std::getenv("FA_TRANSCRIPTS");
  const bool updates = std::getenv("FA_UPDATE_TRANSCRIPTS") != nullptr;
  std::ofstream text(whole == nullptr ? "" : whole);
  std::map<unsigned, std::string> expected;
  std::ifstream file(FA_TRANSCRIPTS_FILE);
  std::string launches;
  std::string params;
  for (unsigned seed = 0; file >> seed >> launches >> params;) expected[seed] = launches + " " + params;
  std::string now;
  int different = 0;
  for (unsigned seed = 0; seed < kAllSeeds; ++seed) {
    const Transcript transcript = of_seed(seed);
    if (whole != nullptr) text << "seed " << seed << "\n" << transcript.launches << transcript.params;
    now += std::to_string(seed) + " " + transcript.digests() + "\n";
    if (updates || expected[seed] == transcript.digests()) continue;
    if (++different == 1) ADD_FAILURE() << "seed " << seed << ":\n" << transcript.launches << transcript.params;
  }
  unsetenv("FA_FAKE_NVRTC_SPILLS");
  if (updates) std::ofstream(FA_TRANSCRIPTS_FILE) << now;
  EXPECT_EQ(different, 0) << "of " << kAllSeeds << " seeds";
}

}  // namespace
}  // namespace fa
