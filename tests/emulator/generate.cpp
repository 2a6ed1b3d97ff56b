// Writes the translation units of the emulator tests: the rendered kernels, as the library would hand them to NVRTC, in
// `kernels_<i>.cpp`, those with functions and the like in `variants_<i>.cpp`, those over pages in `paged_<i>.cpp`,
// appends in `append_<i>.cpp`, merges in `merge_<i>.cpp`, and the mutated ones in `mutants_<i>.cpp`. Those with a fixed
// split size, and their mutants, are in `invariant_<i>.cpp`; those of 8-bit floats and theirs in `fp8_<i>.cpp`; those
// of parts of larger attentions and theirs in `shard_<i>.cpp`, those with statistics, of debug calls and of quantize,
// in `statistics_<i>.cpp`. Those for compute capability 7.5, of all lists, are in `turing_<i>.cpp`.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "emulator/append_specs.hpp"
#include "emulator/fp8_specs.hpp"
#include "emulator/inspect_specs.hpp"
#include "emulator/invariance_specs.hpp"
#include "emulator/merge_specs.hpp"
#include "emulator/mutations.hpp"
#include "emulator/paged_specs.hpp"
#include "emulator/paged_sums_specs.hpp"
#include "emulator/quantize_specs.hpp"
#include "emulator/shard_specs.hpp"
#include "emulator/specs.hpp"
#include "emulator/statistics_specs.hpp"
#include "emulator/top_keys_specs.hpp"
#include "emulator/turing_specs.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/schedule.hpp"
#include "render/source.hpp"
#include "render/templates.hpp"

namespace {

namespace fs = std::filesystem;
using emulator::Mutation;
using fa::plan::KernelSpec;
using fa::render::Source;

/// Leaves a file alone that has the same text already, so that nothing is compiled twice.
void write(const fs::path& path, const std::string& text) {
  std::ostringstream old;
  if (std::ifstream in(path); in) old << in.rdbuf();
  if (fs::exists(path) && old.str() == text) return;
  fs::create_directories(path.parent_path());
  std::ofstream out(path);
  out << text;
  if (!out) throw std::runtime_error("cannot write " + path.string());
}

/// The unit in a namespace of its own, and its registration. Its #include lines have come before, outside of it.
std::string wrapped(const Source& source, const std::string& scope, const std::string& name) {
  return fmt::format(
      "namespace {0} {{\n{1}\nconst emulator::Registration registration(\"{2}\", {3}_entry, {3}_threads, "
      "{3}_min_blocks);\n"
      "}}  // namespace {0}\n\n",
      scope, source.unit, name, source.kernel_name);
}

std::string include_lines(const std::string& unit) {
  std::istringstream lines(unit);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#include")) result += line + "\n";
  }
  return result;
}

/// Those of compute capability 7.5, whose macro changes what headers define, are in files of their own.
bool is_turing(const KernelSpec& spec) {
  return spec.arch.major < 8;
}

/// `scope` begins the names of their namespaces: programs link several lists, each with numbers of its own.
std::string kernels_file(const std::vector<KernelSpec>& specs, std::size_t file, std::size_t files,
                         const char* scope = "unit") {
  std::set<std::string> includes;
  std::string body;
  for (std::size_t i = file; i < specs.size(); i += files) {
    if (is_turing(specs[i])) continue;
    const Source source = fa::render::render(specs[i]);
    includes.insert(include_lines(source.unit));
    body += wrapped(source, fmt::format("{}_{}", scope, i), canonical(specs[i]));
  }
  std::string text = "#include <emulator/registry.hpp>\n\n";
  for (const std::string& lines : includes) text += lines;
  return text + "\n" + body;
}

bool is_space(char c) {
  return c == ' ' || c == '\n';
}

/// End of `pattern` at a place of `text`, or npos. Spaces and line ends of the pattern stand for one or more of them.
std::size_t end_of_match(const std::string& text, std::size_t at, const std::string& pattern) {
  for (std::size_t i = 0; i < pattern.size();) {
    if (!is_space(pattern[i])) {
      if (at == text.size() || text[at++] != pattern[i++]) return std::string::npos;
      continue;
    }
    if (at == text.size() || !is_space(text[at])) return std::string::npos;
    while (i < pattern.size() && is_space(pattern[i])) ++i;
    while (at < text.size() && is_space(text[at])) ++at;
  }
  return at;
}

std::string trimmed(const std::string& text) {
  const std::size_t first = text.find_first_not_of(" \n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \n") + 1 - first);
}

std::string mutated(const Mutation& mutation, const std::string& text) {
  const std::string before = trimmed(mutation.before), after = trimmed(mutation.after);
  int count = 0;
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = end_of_match(text, at, before);
    if (end == std::string::npos) {
      result += text[at++];
      continue;
    }
    result += after;
    at = end;
    ++count;
  }
  if (count == mutation.count) return result;
  throw std::runtime_error(fmt::format("mutation {}: `{}` occurs {} times in {}, not {}", mutation.name,
                                       mutation.before, count, mutation.header, mutation.count));
}

/// "FA_TEMPLATES_PTX_MMA_CUH_" of a header with an include guard.
std::string guard(const std::string& text) {
  constexpr std::string_view kPrefix = "#ifndef ";
  if (!text.starts_with(kPrefix)) throw std::runtime_error("a template without an include guard");
  return text.substr(kPrefix.size(), text.find('\n') - kPrefix.size());
}

/// `text` with its `#include <name>` of templates turned into files under `folder`; the emulator's ptx stays as it is.
std::string redirected(const std::string& text, const fs::path& folder) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#include <") && line.ends_with(".cuh>") && !line.starts_with("#include <ptx/")) {
      line = fmt::format("#include \"{}\"", (folder / line.substr(10, line.size() - 11)).string());
    }
    result += line + "\n";
  }
  return result;
}

/// A template with the comments behind its code, which mutations name: the library has none.
const std::string& commented(const std::string& name) {
  static std::map<std::string, std::string> all;
  const auto [found, is_new] = all.try_emplace(name);
  if (!is_new) return found->second;
  std::ifstream in(fs::path(FA_EMULATOR_TEMPLATES) / name);
  for (std::string line; std::getline(in, line);) {
    line.erase(0, std::min(line.find_first_not_of(' '), line.size()));
    found->second += (line.starts_with("//") ? "" : line) + "\n";
  }
  return found->second;
}

/// Writes the templates with one of them changed. Returns the lines that let them be included once more.
std::string write_mutated_templates(const Mutation& mutation, const fs::path& folder) {
  std::string undefines =
      "#undef FA_KERNEL\n#undef FA_PLACED_KERNEL\n#undef FA_DEVICE\n#undef FA_UNROLL\n#undef FA_UNROLL_BY\n";
  bool found = false;
  for (const fa::render::Header& header : fa::render::templates().headers()) {
    const std::string& text = commented(header.name);
    const std::string name = guard(text);
    undefines += fmt::format("#undef {}\n", name);
    if (header.name.starts_with("ptx/")) {
      constexpr std::string_view kPrefix = "FA_TEMPLATES_PTX_";
      undefines += fmt::format("#undef FA_TESTS_EMULATOR_PTX_{}\n", name.substr(kPrefix.size()));
    }
    const bool changed = header.name == mutation.header;
    found = found || changed;
    write(folder / header.name, redirected(changed ? mutated(mutation, text) : text, folder));
  }
  if (!found) throw std::runtime_error("mutation of an unknown header: " + mutation.header);
  return undefines;
}

/// A mutant sees every header anew, in a namespace other than `fa`, so that its templates are not taken for the real
/// ones by the linker.
std::string mutant(const Mutation& mutation, const fs::path& folder) {
  const KernelSpec& subject = mutation.subject.spec;
  const Source source =
      fa::render::render(emulator::is_of_merge(mutation.header, subject) ? emulator::combine_spec(subject)
                         : is_of_schedule(mutation)                      ? fa::plan::schedule_spec(subject)
                                                                         : subject);
  const fs::path own = folder / mutation.name;
  const bool turing = is_turing(subject);
  return write_mutated_templates(mutation, own) +
         fmt::format("#define fa fa_{}\n{}{}", mutation.name, turing ? "#define FA_TURING 1\n" : "",
                     redirected(include_lines(source.unit), own)) +
         redirected(wrapped(source, "mutant_" + mutation.name, "mutant " + mutation.name), own) + "#undef fa\n" +
         (turing ? "#undef FA_TURING\n\n" : "\n");
}

std::string mutants_file(const fs::path& folder, std::size_t file, std::size_t files) {
  std::string text = "#include <emulator/registry.hpp>\n#include <emulator/instructions.hpp>\n\n";
  const std::vector<std::size_t>& built = emulator::built_mutations();
  for (std::size_t i = file; i < built.size(); i += files) {
    text += mutant(emulator::mutations()[built[i]], folder / "mutants");
  }
  return text;
}

std::string invariant_file(const fs::path& folder, std::size_t file, std::size_t files) {
  std::vector<KernelSpec> specs;
  for (const emulator::InvariantPath& path : emulator::invariant_paths()) {
    specs.push_back(path.spec);
    if (!path.spec.variants.mask.empty() && !path.config.varlen && path.config.page_size == 0) {
      specs.push_back(fa::plan::mask_tiles_spec(path.spec));
    }
  }
  for (const auto& path : emulator::dense_batch_paths()) specs.push_back(path.spec);
  std::set<std::string> seen;
  for (const emulator::InvariantPath& path : emulator::batch_paths()) {
    specs.push_back(path.spec);
    const KernelSpec combine = emulator::combine_spec(path.spec);
    if (path.spec.split && seen.insert(canonical(combine)).second) specs.push_back(combine);
  }
  std::string text = "#include <emulator/instructions.hpp>\n" + kernels_file(specs, file, files);
  std::vector<emulator::InvarianceMutation> all = emulator::invariance_mutations();
  all.insert(all.end(), emulator::batch_mutations().begin(), emulator::batch_mutations().end());
  for (std::size_t i = file; i < all.size(); i += files) {
    text += mutant({all[i].name, all[i].before, all[i].after, path_of(all[i]).spec, {}, 1, all[i].header},
                   folder / "invariant_mutants");
  }
  return text;
}

std::string fp8_file(const fs::path& folder, std::size_t file, std::size_t files) {
  std::vector<KernelSpec> specs = emulator::fp8_specs();
  for (const auto* const more : {&emulator::fp8_packed_specs(), &emulator::fp8_paged_specs()}) {
    specs.insert(specs.end(), more->begin(), more->end());
  }
  const std::vector<KernelSpec> subjects = specs;
  for (const auto* const variants : {&emulator::fp8_variants(), &emulator::fp8_packed_variants()}) {
    for (const emulator::Fp8Variant& variant : *variants) specs.push_back(variant.spec);
  }
  std::set<std::string> seen;
  for (const KernelSpec& spec : std::vector(specs)) {
    const KernelSpec combine = emulator::combine_spec(spec);
    if (spec.split && seen.insert(canonical(combine)).second) specs.push_back(combine);
    if (spec.variants.mask.empty() || spec.varlen) continue;
    const KernelSpec lists = fa::plan::mask_tiles_spec(spec);
    if (seen.insert(canonical(lists)).second) specs.push_back(lists);
  }
  std::string text = "#include <emulator/instructions.hpp>\n" + kernels_file(specs, file, files);
  const std::vector<emulator::Fp8Mutation>& all = emulator::fp8_mutations();
  for (std::size_t i = file; i < all.size(); i += files) {
    text += mutant({all[i].name, all[i].before, all[i].after, subjects[all[i].spec], {}, all[i].count, all[i].header},
                   folder / "fp8_mutants");
  }
  return text;
}

std::string shard_file(const fs::path& folder, std::size_t file, std::size_t files) {
  std::string text = "#include <emulator/instructions.hpp>\n" + kernels_file(emulator::all_shard_specs(), file, files);
  const std::vector<emulator::ShardMutation>& all = emulator::shard_mutations();
  for (std::size_t i = file; i < all.size(); i += files) {
    text += mutant({all[i].name, all[i].before, all[i].after, {subject_of(all[i])}, {}, all[i].count, all[i].header},
                   folder / "shard_mutants");
  }
  return text;
}

std::string statistics_file(const fs::path& folder, std::size_t file, std::size_t files) {
  std::vector<KernelSpec> specs = emulator::all_statistics_specs();
  for (const KernelSpec& spec : emulator::all_inspect_specs()) specs.push_back(spec);
  for (const KernelSpec& spec : emulator::all_quantize_specs()) specs.push_back(spec);
  for (const KernelSpec& spec : emulator::all_top_keys_specs()) specs.push_back(spec);
  for (const KernelSpec& spec : emulator::all_paged_sums_specs()) specs.push_back(spec);
  std::string text = "#include <emulator/instructions.hpp>\n" + kernels_file(specs, file, files);
  const auto add = [&](const std::vector<emulator::StatisticsMutation>& all, const auto& subject_of_mutation) {
    for (std::size_t i = file; i < all.size(); i += files) {
      const KernelSpec subject = subject_of_mutation(all[i]);
      text += mutant({all[i].name, all[i].before, all[i].after, {subject}, {}, all[i].count, all[i].header},
                     folder / "statistics_mutants");
    }
  };
  add(emulator::statistics_mutations(), [](const emulator::StatisticsMutation& of) { return subject_of(of); });
  add(emulator::inspect_mutations(), emulator::inspected_subject_of);
  add(emulator::quantize_mutations(), emulator::quantized_subject_of);
  add(emulator::top_keys_mutations(), emulator::top_keys_subject_of);
  add(emulator::paged_sums_mutations(), emulator::paged_sums_subject_of);
  return text;
}

/// Kernels for compute capability 7.5 of every list, each once.
std::vector<KernelSpec> turing_specs() {
  std::set<std::string> seen;
  std::vector<KernelSpec> unique;
  for (const std::vector<KernelSpec>& list : {emulator::all_turing_specs(), emulator::all_specs(),
                                              emulator::all_variant_specs(), emulator::all_paged_specs()}) {
    for (const KernelSpec& spec : list) {
      if (is_turing(spec) && seen.insert(canonical(spec)).second) unique.push_back(spec);
    }
  }
  return unique;
}

/// In a namespace of its own, as mutants are.
std::string turing_file(const fs::path& folder, const std::vector<KernelSpec>& specs, std::size_t file,
                        std::size_t files) {
  const fs::path own = folder / "turing";
  const std::string line = "namespace fa::sm80 {";  // stays
  const Mutation same{"turing", line, line, specs.front(), {}, 1, "sm80/sm80_tf32x3.cuh"};
  const std::string undefines = write_mutated_templates(same, own);
  std::set<std::string> includes;
  std::string body;
  for (std::size_t i = file; i < specs.size(); i += files) {
    const Source source = fa::render::render(specs[i]);
    includes.insert(include_lines(source.unit));
    body += redirected(wrapped(source, fmt::format("turing_{}", i), canonical(specs[i])), own);
  }
  std::string text = "#include <emulator/registry.hpp>\n#include <emulator/instructions.hpp>\n\n" + undefines +
                     "#define fa fa_turing\n#define FA_TURING 1\n";
  for (const std::string& lines : includes) text += redirected(lines, own);
  return text + "\n" + body;
}

}  // namespace

/// generate FOLDER KERNEL_FILES VARIANT_FILES MUTANT_FILES PAGED_FILES APPEND_FILES MERGE_FILES INVARIANT_FILES
/// FP8_FILES SHARD_FILES STATISTICS_FILES TURING_FILES
int main(int argc, char** argv) {
  try {
    if (argc != 13) {
      throw std::runtime_error(
          "usage: generate FOLDER KERNEL_FILES VARIANT_FILES MUTANT_FILES PAGED_FILES APPEND_FILES MERGE_FILES "
          "INVARIANT_FILES FP8_FILES SHARD_FILES STATISTICS_FILES TURING_FILES");
    }
    const fs::path folder = argv[1];
    const std::size_t kernel_files = std::stoul(argv[2]);
    const std::size_t variant_files = std::stoul(argv[3]);
    const std::size_t mutant_files = std::stoul(argv[4]);
    const std::size_t paged_files = std::stoul(argv[5]);
    const std::vector<KernelSpec> paged = emulator::all_paged_specs();
    for (std::size_t i = 0; i < paged_files; ++i) {
      write(folder / fmt::format("paged_{}.cpp", i), kernels_file(paged, i, paged_files, "paged"));
    }
    const std::size_t append_files = std::stoul(argv[6]);
    const std::vector<KernelSpec> appends = emulator::all_append_specs();
    for (std::size_t i = 0; i < append_files; ++i) {
      write(folder / fmt::format("append_{}.cpp", i), kernels_file(appends, i, append_files, "append"));
    }
    const std::size_t merge_files = std::stoul(argv[7]);
    const std::vector<KernelSpec> merges = emulator::all_merge_specs();
    for (std::size_t i = 0; i < merge_files; ++i) {
      write(folder / fmt::format("merge_{}.cpp", i), kernels_file(merges, i, merge_files, "merge"));
    }
    const std::size_t invariant_files = std::stoul(argv[8]);
    for (std::size_t i = 0; i < invariant_files; ++i) {
      write(folder / fmt::format("invariant_{}.cpp", i), invariant_file(folder, i, invariant_files));
    }
    const std::size_t fp8_files = std::stoul(argv[9]);
    for (std::size_t i = 0; i < fp8_files; ++i) {
      write(folder / fmt::format("fp8_{}.cpp", i), fp8_file(folder, i, fp8_files));
    }
    const std::size_t shard_files = std::stoul(argv[10]);
    for (std::size_t i = 0; i < shard_files; ++i) {
      write(folder / fmt::format("shard_{}.cpp", i), shard_file(folder, i, shard_files));
    }
    const std::size_t statistics_files = std::stoul(argv[11]);
    for (std::size_t i = 0; i < statistics_files; ++i) {
      write(folder / fmt::format("statistics_{}.cpp", i), statistics_file(folder, i, statistics_files));
    }
    const std::size_t turing_files = std::stoul(argv[12]);
    const std::vector<KernelSpec> turing = turing_specs();
    for (std::size_t i = 0; i < turing_files; ++i) {
      write(folder / fmt::format("turing_{}.cpp", i), turing_file(folder, turing, i, turing_files));
    }
    const std::vector<KernelSpec> specs = emulator::all_specs();
    for (std::size_t i = 0; i < kernel_files; ++i) {
      write(folder / fmt::format("kernels_{}.cpp", i), kernels_file(specs, i, kernel_files));
    }
    const std::vector<KernelSpec> variants = emulator::all_variant_specs();
    for (std::size_t i = 0; i < variant_files; ++i) {
      write(folder / fmt::format("variants_{}.cpp", i), kernels_file(variants, i, variant_files));
    }
    // Each applies, also those that are not built.
    for (const Mutation& mutation : emulator::mutations()) mutated(mutation, commented(mutation.header));
    for (std::size_t i = 0; i < mutant_files; ++i) {
      write(folder / fmt::format("mutants_{}.cpp", i), mutants_file(folder, i, mutant_files));
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
