// Runs a target without libFuzzer:
//
//   fa_replay_NAME                  over its seeds and some thousand inputs that are made of them
//   fa_replay_NAME FILE...          over files, such as one that libFuzzer left behind
//   fa_replay_NAME --write FOLDER   not at all: writes the seeds into a folder, for libFuzzer to begin with
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz/random.hpp"
#include "fuzz/targets/target.hpp"

namespace fa::fuzz {
namespace {

void run(const std::string& input) {
  // A copy of exactly its size, so that a sanitizer sees the first byte beyond.
  const std::vector<std::uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

std::string mutated(std::string input, const std::vector<std::string>& all, Random& random) {
  for (std::uint64_t count = 1 + random.below(4); count > 0; --count) {
    const std::size_t at = random.index(input.size() + 1);
    switch (random.below(5)) {
      case 0:
        input.resize(at);
        break;
      case 1:
        input.insert(at, 1, static_cast<char>(random.next()));
        break;
      case 2: {
        const std::string& other = all[random.index(all.size())];
        input.insert(at, other.substr(random.index(other.size() + 1), random.index(40)));
        break;
      }
      case 3:
        input.erase(at, random.index(8));
        break;
      default:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << random.below(8)));
        break;
    }
  }
  return input;
}

int write_seeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : seeds()) std::ofstream(folder / std::to_string(number++), std::ios::binary) << seed;
  return 0;
}

int run_seeds() {
  constexpr int kMutations = 4000;
  const std::vector<std::string> all = seeds();
  for (const std::string& seed : all) run(seed);
  Random random(1);
  for (int i = 0; i < kMutations; ++i) run(mutated(all[random.index(all.size())], all, random));
  return 0;
}

}  // namespace
}  // namespace fa::fuzz

int main(int count, char** arguments) {
  if (count == 3 && std::strcmp(arguments[1], "--write") == 0) return fa::fuzz::write_seeds(arguments[2]);
  if (count == 1) return fa::fuzz::run_seeds();
  for (int i = 1; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    fa::fuzz::run(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  return 0;
}
