#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "api/build.hpp"
#include "cache.hpp"
#include "cache/explain.hpp"
#include "cache/pack.hpp"
#include "cache/store.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan_options.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

constexpr std::size_t kNeighbours = 2;

struct WhyOptions {
  std::string arch;
  PlanPoint point;
  PlanOptions plan;
  std::string directory;
  std::vector<std::string> packs;
  std::string compilers;
  bool json = false;
};

/// One kernel of a plan and what a look-up makes of it.
struct Answer {
  cache::Key key;
  cache::Lookup lookup;
  std::vector<cache::Neighbour> neighbours;  ///< of a miss
};

/// What a call would do, from what is stored.
struct Verdict {
  std::string text;
  bool compiles = false;
  plan::KernelSpec taken = {};
};

class Inquiry {
 public:
  explicit Inquiry(const WhyOptions& options) {
    CachePolicy policy;
    policy.packs = options.packs;
    policy.compilers = options.compilers;
    cache::StoreOptions store;
    const std::filesystem::path directory = existing_cache_directory(options.directory);
    std::error_code ignored;
    if (std::filesystem::exists(directory, ignored)) {
      store.directory = directory;  // looking for a reason makes no directory
    }
    store.packs = api::cache_packs(policy);
    store.accept = api::cache_acceptance(policy);
    store.warn = [](const std::string& message) { print_failure(message); };
    store_ = std::make_unique<cache::Store>(store);
    stored_ = cache::list_stored(directory);
    for (const std::filesystem::path& file : store.packs) {
      std::string problem;  // the store has told it
      std::ranges::move(cache::list_pack(file, &problem), std::back_inserter(stored_));
    }
  }

  Answer ask(const plan::KernelSpec& spec) const {
    Answer answer;
    answer.key = api::cache_key(spec);
    answer.lookup = store_->get(answer.key, nullptr, [&spec] { return api::substitute_keys(spec); });
    if (!answer.lookup.entry) {
      answer.neighbours = cache::nearest(answer.key, stored_, kNeighbours);
    }
    return answer;
  }

 private:
  std::unique_ptr<cache::Store> store_;
  std::vector<cache::StoredEntry> stored_;
};

/// The kernels in the order of the plan, up to the one that runs: what stands behind it is never looked up.
std::vector<Answer> ask_all(const Inquiry& inquiry, const plan::Alternatives& specs, Verdict* verdict) {
  std::vector<Answer> answers;
  const Answer* best = nullptr;
  plan::KernelSpec taken;
  answers.reserve(specs.size());
  for (const plan::KernelSpec& spec : specs) {
    answers.push_back(inquiry.ask(spec));
    const Answer& answer = answers.back();
    if (!answer.lookup.entry) {
      *verdict = {"would be compiled", true, spec};
      return answers;
    }
    if (best == nullptr || answer.lookup.entry->local_bytes < best->lookup.entry->local_bytes) {
      best = &answer;
      taken = spec;
    }
    if (best->lookup.entry->local_bytes == 0) {
      break;
    }
  }
  *verdict = {fmt::format("is served by {}", best->lookup.entry->key.spec), false, taken};
  return answers;
}

std::string state_of(const Answer& answer) {
  if (!answer.lookup.entry) {
    return answer.lookup.refused.empty() ? "missing" : "refused";
  }
  return answer.lookup.origin == cache::Origin::pack ? "pack" : "directory";
}

void print_neighbour(const cache::Neighbour& neighbour) {
  fmt::print("    nearest: {}\n", printable(neighbour.stored->path.string()));
  for (const cache::Difference& difference : neighbour.differences) {
    const auto shown = [](const std::string& value) {
      return value.empty() ? std::string("(nothing)") : printable(value);
    };
    fmt::print("      {:<20} wanted {}, stored {}\n", difference.field, shown(difference.wanted),
               shown(difference.stored));
  }
}

void print_answer(const Answer& answer) {
  fmt::print("{:<9} {} ({})\n", state_of(answer), answer.key.spec, answer.key.digest());
  if (answer.lookup.entry) {
    const cache::Entry& entry = *answer.lookup.entry;
    if (entry.key != answer.key) {
      fmt::print("    in its place: {} ({})\n", printable(entry.key.spec), entry.key.digest());
    }
    fmt::print("    {}, {} registers, {} bytes of local memory\n", printable(entry.compiler), entry.registers,
               entry.local_bytes);
    return;
  }
  if (!answer.lookup.refused.empty()) {
    fmt::print("    {}\n", printable(answer.lookup.refused));
    return;
  }
  if (answer.neighbours.empty()) {
    fmt::print("    nothing is stored\n");
  }
  for (const cache::Neighbour& neighbour : answer.neighbours) {
    print_neighbour(neighbour);
  }
}

nlohmann::json to_json(const Answer& answer) {
  nlohmann::json neighbours = nlohmann::json::array();
  for (const cache::Neighbour& neighbour : answer.neighbours) {
    nlohmann::json differences = nlohmann::json::array();
    for (const cache::Difference& difference : neighbour.differences) {
      differences.push_back(
          {{"field", difference.field}, {"wanted", difference.wanted}, {"stored", difference.stored}});
    }
    neighbours.push_back({{"path", neighbour.stored->path.string()}, {"differences", differences}});
  }
  return {{"spec", answer.key.spec},
          {"digest", answer.key.digest()},
          {"state", state_of(answer)},
          {"refused", answer.lookup.refused},
          {"served_by", answer.lookup.entry ? answer.lookup.entry->key.digest() : ""},
          {"nearest", neighbours}};
}

/// The kernels of a plan without those that list tiles for what is not taken.
std::vector<plan::Alternatives> without_other_lists(const Inquiry& inquiry, std::vector<plan::Alternatives> kernels) {
  std::vector<plan::KernelSpec> read;
  for (const plan::Alternatives& specs : kernels) {
    if (!plan::reads_tile_lists(specs.front().op())) continue;
    Verdict verdict;
    ask_all(inquiry, specs, &verdict);
    read.push_back(plan::mask_tiles_spec(verdict.taken));
  }
  std::erase_if(kernels, [&](const plan::Alternatives& specs) {
    const plan::KernelSpec& spec = specs.front();
    const bool lists = spec.op() == plan::Op::mask_rows || spec.op() == plan::Op::mask_keys;
    return lists && std::ranges::find(read, spec) == read.end();
  });
  return kernels;
}

/// Fails when something would be compiled, so that a script can ask.
int why(WhyOptions options) {
  options.point.arch = options.arch.empty() ? default_arch() : plan::parse_target(options.arch);
  const Inquiry inquiry(options);
  nlohmann::json kernels = nlohmann::json::array();
  bool compiles = false;
  for (const plan::Alternatives& specs : without_other_lists(inquiry, plan_kernels(options.plan, options.point))) {
    Verdict verdict;
    const std::vector<Answer> answers = ask_all(inquiry, specs, &verdict);
    compiles = compiles || verdict.compiles;
    nlohmann::json looked_up = nlohmann::json::array();
    for (const Answer& answer : answers) {
      if (options.json) {
        looked_up.push_back(to_json(answer));
      } else {
        print_answer(answer);
      }
    }
    if (options.json) {
      kernels.push_back({{"looked_up", looked_up}, {"verdict", verdict.text}});
    } else {
      fmt::print("=> {} {}\n", kernel_name(specs.front()), verdict.text);
    }
  }
  if (options.json) {
    print_json({{"kernels", kernels}});
  }
  return compiles ? kFailure : kSuccess;
}

}  // namespace

void add_why(CLI::App& cache_command, int* exit_code) {
  CLI::App* command = cache_command.add_subcommand(
      "why", "What a problem's look-up finds, and why it misses, field by field against the nearest entries");
  const auto options = std::make_shared<WhyOptions>();
  command->add_option("--arch", options->arch, "Target, as sm_90a (default: the GPU's, else sm_90a)");
  add_dtype_option(*command, &options->point.dtype);
  command->add_option("--head-dim", options->point.head_dim, "d_qk (default: 128)");
  const auto set_causal = [options](const std::string& text) { options->point.causal = text == "yes"; };
  command->add_option_function<std::string>("--causal", set_causal, "Causal mask: no or yes")
      ->check(offered({"no", "yes"}))
      ->check(CLI::IsMember({"no", "yes"}));
  command->add_option("--directory", options->directory, "Instead of the default cache directory");
  command->add_option("--pack", options->packs, "Packs that are searched first")->delimiter(',');
  command->add_option("--compilers", options->compilers, "Accepted compilers, as 13.0 or >=12.8");
  command->add_flag("--json", options->json, "Print JSON");
  add_plan_options(*command, &options->plan);
  command->callback([options, exit_code] { *exit_code = why(*options); });
}

}  // namespace fa::cli
