// What tools/sass_diff.py compares: the kernels of the golden, the pairwise, the family and the field list and of the
// tuned tables.
//
//     fa_spec_cubins list                     JSON: name, list, canonical text, entry point and digest of each
//     fa_spec_cubins compile FOLDER JOBS      compiles those whose digests come on standard input, one a line, to
//                                             FOLDER/<digest>.cubin and .json
//
// FA_TEMPLATE_DIR names other templates than those that are built in.

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <fa/error.hpp>

#include "api/build.hpp"
#include "compile/compiler.hpp"
#include "render/source.hpp"
#include "tools/fa/parallel.hpp"
#include "tune/tuned_row.hpp"
#include "unit/render/spec_list.hpp"

namespace fa {
namespace {

struct Listed {
  std::string list;
  std::string name;
  plan::KernelSpec spec;
  std::string digest;
};

class Lists {
 public:
  void add(const std::string& list, const std::string& name, const plan::KernelSpec& spec) {
    std::string digest = api::cache_key(spec).digest();
    if (digests_.insert(digest).second) all_.push_back({list, name, spec, std::move(digest)});
  }
  std::vector<Listed> take() && { return std::move(all_); }

 private:
  std::set<std::string> digests_;
  std::vector<Listed> all_;
};

std::vector<Listed> all_kernels() {
  Lists lists;
  for (const tune::Table& table : tune::shipped_tables()) {
    for (const tune::Table::Row& row : table.rows) {
      std::string reason;
      const std::optional<tune::TunedRow> meant = tune::tuned_row(row, &reason);
      if (!meant) throw std::runtime_error(row.problem + ": " + reason);
      lists.add("tuned", "tuned " + row.winner.kernel, meant->kernel);
    }
  }
  for (const render::NamedSpec& named : render::golden_list()) lists.add("golden", named.name, named.spec);
  for (const render::NamedSpec& named : render::pairwise_list()) lists.add("pairwise", named.name, named.spec);
  for (const render::NamedSpec& named : render::family_list()) lists.add("family", named.name, named.spec);
  for (const render::NamedSpec& named : render::field_list()) lists.add("fields", named.name, named.spec);
  return std::move(lists).take();
}

void print(const std::vector<Listed>& kernels) {
  nlohmann::json json = nlohmann::json::array();
  for (const Listed& kernel : kernels) {
    json.push_back({{"list", kernel.list},
                    {"name", kernel.name},
                    {"spec", canonical(kernel.spec)},
                    {"kernel", kernel_name(kernel.spec)},
                    {"target", to_string(kernel.spec.arch)},
                    {"digest", kernel.digest}});
  }
  std::cout << json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

/// The facts are written last: who finds them finds the cubin too.
void compile(const Listed& kernel, const std::string& folder) {
  nlohmann::json facts;
  try {
    const compile::Cubin cubin = compile::compile(render::render(kernel.spec), kernel.spec.arch);
    std::ofstream(folder + "/" + kernel.digest + ".cubin", std::ios::binary)
        .write(reinterpret_cast<const char*>(cubin.bytes.data()), static_cast<std::streamsize>(cubin.bytes.size()));
    facts = {{"registers", cubin.facts.registers},
             {"local_bytes", cubin.facts.local_bytes},
             {"static_shared", cubin.facts.static_shared},
             {"log", cubin.log}};
  } catch (const Error& error) {
    facts = {{"error", error.what()}};
  }
  std::ofstream(folder + "/" + kernel.digest + ".json")
      << facts.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
}

int run(const std::vector<std::string>& arguments) {
  if (arguments == std::vector<std::string>{"list"}) {
    print(all_kernels());
    return 0;
  }
  if (arguments.size() != 3 || arguments[0] != "compile") {
    throw std::runtime_error("usage: fa_spec_cubins list | fa_spec_cubins compile FOLDER JOBS");
  }
  std::set<std::string> wanted;
  for (std::string line; std::getline(std::cin, line);) wanted.insert(line);
  std::vector<Listed> kernels = all_kernels();
  std::erase_if(kernels, [&](const Listed& kernel) { return !wanted.contains(kernel.digest); });
  cli::parallel_for(kernels.size(), std::stoi(arguments[2]), [&](std::size_t i) { compile(kernels[i], arguments[1]); });
  return 0;
}

}  // namespace
}  // namespace fa

int main(int argc, char** argv) {
  try {
    return fa::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "fa_spec_cubins: " << error.what() << '\n';
    return 1;
  }
}
