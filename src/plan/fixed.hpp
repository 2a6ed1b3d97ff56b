#ifndef FA_SRC_PLAN_FIXED_HPP_
#define FA_SRC_PLAN_FIXED_HPP_

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fa/types.hpp>

#include "plan/kernel_spec.hpp"

namespace fa::plan {

struct Field;

/// What a KernelOverride fixes, as the lists of the kernels that it may mean have read it.
class Fixed {
 public:
  Family family = Family::automatic;
  const Kernel* kernel = nullptr;  ///< where one of a family's kernels is named

  Fixed() = default;
  /// Of fields that some kernel has.
  Fixed(std::initializer_list<std::pair<std::string_view, int>> fields) : Fixed(Family::automatic, fields) {}
  Fixed(Family wanted, std::initializer_list<std::pair<std::string_view, int>> fields = {});

  /// The value of a field, or what is planned where it is open.
  int number(std::string_view name, int planned = 0) const noexcept { return find(name).value_or(planned); }
  bool flag(std::string_view name, bool planned) const noexcept { return find(name).value_or(planned) != 0; }
  bool has(std::string_view name) const noexcept { return find(name).has_value(); }

  /// Whether a field is fixed that no call decides: more than packing and splitting. The second form: of a kernel's.
  bool fixes_tile() const noexcept;
  bool fixes_tile_of(const Kernel& of) const noexcept;
  /// Whether a kernel has every field that is fixed.
  bool fits(const Kernel& of) const noexcept;

  /// Sets the fields of a spec that no rule sets (Field::by_override), where they are fixed.
  void set_others(KernelSpec& spec) const;

  /// A number of 0 leaves its field open.
  void set(std::string_view name, int value);
  /// The same for another family, as far as calls decide it too.
  Fixed without_tile(Family other) const;

  /// "tile_m=64 stages=2".
  std::string text() const;
  /// The names and values, in the order in which they were fixed.
  std::vector<std::pair<std::string_view, int>> fields() const;

 private:
  std::optional<int> find(std::string_view name) const noexcept;

  std::vector<std::pair<const Field*, int>> fields_;
};

/// What an override fixes that names this attention kernel with all its fields.
Fixed fixed_to(const KernelSpec& spec);

/// Reads an override of kernels that do `op` (forward or backward). Throws fa::Error(invalid_argument) that names the
/// field and what is accepted; `argument` is the override's own name.
Fixed read_override(const KernelOverride& given, Op op, std::string_view argument);
Fixed read_override(const std::optional<KernelOverride>& given, Op op, std::string_view argument);

/// Whether an override of a forward names the family of all GPUs. Looked at by whoever makes a problem.
bool names_portable(const std::optional<KernelOverride>& given) noexcept;

/// Buffers of rows that an override of the pass of column sums fixes, which read_override has accepted; 0: none, as of
/// all other overrides. Such an override leaves the forward's kernels as planned.
int sum_buffers(const std::optional<KernelOverride>& given) noexcept;

/// Throws fa::Error(invalid_argument) where an override names one kernel of a family, which plans another. `argument`
/// as read_override has it.
void check_kernel(const Fixed& fixed, const KernelSpec& planned, std::string_view argument);

/// The fields that an override of kernels that do `op` may fix; of several kernels' fields of one name the first.
std::vector<const Field*> open_fields(Op op);

/// Of an override's text "name=value name=value" every name and value. Throws like read_override.
std::vector<std::pair<std::string_view, std::string_view>> split_fields(std::string_view text,
                                                                        std::string_view argument);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_FIXED_HPP_
