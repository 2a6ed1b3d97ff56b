#ifndef FA_SRC_PLAN_FIELD_HPP_
#define FA_SRC_PLAN_FIELD_HPP_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// One number or switch of a kernel. A kernel has one list of them, in the order of its canonical text. From it follow
/// that text, the lines of Config in the rendered unit, what an override may fix, the options of the command line and
/// its sweeps.
struct Field {
  enum class Kind : std::uint8_t { number, flag };
  enum class Shown : std::uint8_t {
    always,
    when_set,  ///< a flag that is on, a number above `unset`: texts of kernels without it do not have the field
    derived,   ///< a line of Config that follows from other fields; none where `get` returns kAbsent
  };
  /// Where a line stands in Config; of one place, in the order of the list.
  enum class Place : std::uint8_t { numbers, flags, last };
  static constexpr int kAbsent = -1;

  std::string_view name;
  int (*get)(const KernelSpec&) = nullptr;
  void (*set)(KernelSpec&, int) = nullptr;
  Kind kind = Kind::number;
  Shown shown = Shown::always;
  Place place = Place::numbers;
  int unset = 1;              ///< a number that stands for none, as do those below
  bool or_negative = false;   ///< those below 0 do not
  bool own = false;           ///< of this kernel's own struct
  std::string_view constant;  ///< of Config: "kTileM"; empty: it is no part of the unit
  std::string_view comment;   ///< behind its line
  bool of_call = false;       ///< an override fixes what every call decides else
  bool of_override = false;   ///< no rule sets it, an override alone
  std::string_view help;      ///< what an override of it means; empty: it follows from the problem, or other fields

  constexpr Field as(std::string_view constant_name, std::string_view line_comment = {}) const {
    Field field = *this;
    field.constant = constant_name;
    field.comment = line_comment;
    return field;
  }
  constexpr Field when_set() const {
    Field field = *this;
    field.shown = Shown::when_set;
    field.place = Place::last;
    return field;
  }
  /// A number from 1, where 0 is none.
  constexpr Field when_above_0() const {
    Field field = when_set();
    field.unset = 0;
    return field;
  }
  /// Likewise, or a negative one.
  constexpr Field when_not_0() const {
    Field field = when_above_0();
    field.or_negative = true;
    return field;
  }
  constexpr Field at(Place where) const {
    Field field = *this;
    field.place = where;
    return field;
  }
  /// An override may fix it.
  constexpr Field open(std::string_view meaning) const {
    Field field = *this;
    field.help = meaning;
    return field;
  }

  /// Calls decide it, where no override does.
  constexpr Field by_call() const {
    Field field = *this;
    field.of_call = true;
    return field;
  }

  /// An override alone sets it: what is to be measured, or pays in cases that the planner does not see. Nothing of the
  /// planner names it.
  constexpr Field by_override() const {
    Field field = *this;
    field.of_override = true;
    return field;
  }

  bool is_set(const KernelSpec& spec) const {
    const int value = get(spec);
    return value > (kind == Kind::number ? unset : 0) || (or_negative && value < 0);
  }
};

namespace detail {

template <class>
struct MemberOf;
template <class Struct, class Value>
struct MemberOf<Value Struct::*> {
  using struct_type = Struct;
  using value_type = Value;
};

struct AnyValue {
  template <class Value>
  operator Value() const;  // NOLINT(google-explicit-constructor): it stands for a member's value
};

template <class Struct, std::size_t... I>
constexpr bool has_members(std::index_sequence<I...>) {
  return requires {
    Struct{(static_cast<void>(I), AnyValue{})...};
  };
}

template <class Struct, std::size_t N = 0>
constexpr std::size_t members() {
  if constexpr (has_members<Struct>(std::make_index_sequence<N + 1>())) {
    return members<Struct, N + 1>();
  } else {
    return N;
  }
}

}  // namespace detail

/// A member of the head (`&SpecHead::tile_m`), or of a kernel's own struct.
template <auto Member>
constexpr Field field(std::string_view name) {
  using Struct = typename detail::MemberOf<decltype(Member)>::struct_type;
  using Value = typename detail::MemberOf<decltype(Member)>::value_type;
  constexpr bool kOwn = !std::is_same_v<Struct, SpecHead>;
  constexpr bool kFlag = std::is_same_v<Value, bool>;
  static_assert(kFlag || std::is_same_v<Value, int>);
  Field result;
  result.name = name;
  result.kind = kFlag ? Field::Kind::flag : Field::Kind::number;
  result.place = kFlag ? Field::Place::flags : Field::Place::numbers;
  result.own = kOwn;
  result.get = [](const KernelSpec& spec) {
    if constexpr (kOwn)
      return static_cast<int>(spec.as<Struct>().*Member);
    else
      return static_cast<int>(spec.*Member);
  };
  result.set = [](KernelSpec& spec, int value) {
    if constexpr (kOwn)
      spec.as<Struct>().*Member = static_cast<Value>(value);
    else
      spec.*Member = static_cast<Value>(value);
  };
  return result;
}

/// A flag of Config that is no field: it follows from others.
constexpr Field derived(std::string_view constant, int (*get)(const KernelSpec&), std::string_view comment = {}) {
  Field result;
  result.get = get;
  result.kind = Field::Kind::flag;
  result.shown = Field::Shown::derived;
  result.place = Field::Place::last;
  return result.as(constant, comment);
}

/// A launch parameter that an override may fix: no part of the spec.
constexpr Field launched(std::string_view name, std::string_view meaning) {
  Field result;
  result.name = name;
  result.shown = Field::Shown::derived;
  return result.open(meaning).by_call();
}

/// Whether a list names every member of a kernel's own struct: one that it left out would be no part of cache keys.
template <class Own, std::size_t N>
constexpr bool is_complete(const Field (&list)[N]) {
  std::size_t own = 0;
  for (const Field& field : list) own += field.own ? 1 : 0;
  return own == detail::members<Own>();
}

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_FIELD_HPP_
