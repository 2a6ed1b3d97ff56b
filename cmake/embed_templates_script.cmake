file(GLOB_RECURSE names RELATIVE ${ROOT} ${ROOT}/*.cuh)
list(SORT names)
set(body "#include \"render/embedded_templates.hpp\"\n\nnamespace fa::render {\n\n")
string(APPEND body "std::span<const EmbeddedTemplate> embedded_templates() {\n  static const EmbeddedTemplate kTemplates[] = {\n")
foreach(name IN LISTS names)
  file(READ ${ROOT}/${name} text)
  # Lines keep their numbers, but neither their indentation nor comments: a third of the text. No string has two slashes.
  string(REGEX REPLACE "\n +" "\n" text "${text}")
  string(REGEX REPLACE " *//[^\n]*" "" text "${text}")
  # A string literal may hold 64 KB at most in portable C++; templates are far smaller.
  string(APPEND body "      {\"${name}\", R\"FA_TEMPLATE(${text})FA_TEMPLATE\"},\n")
endforeach()
string(APPEND body "  };\n  return kTemplates;\n}\n\n}  // namespace fa::render\n")
file(WRITE ${OUTPUT} "${body}")
