"""Conan recipe of fa, built from the checkout that it lies in: conan create packaging/conan --build=missing"""

import re
import shutil
from pathlib import Path

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load

required_conan_version = ">=2.0"


class FaConan(ConanFile):
    name = "fa"
    description = "Exact attention for C++ and C by kernels that are compiled and cached at run time"
    license = "Apache-2.0"
    topics = ("attention", "cuda", "nvrtc", "transformers")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False], "tools": [True, False]}
    default_options = {
        "shared": True,
        "fPIC": True,
        "tools": True,
        "fmt/*:header_only": True,
        "spdlog/*:header_only": True,
    }

    @property
    def _checkout(self) -> Path:
        return Path(self.recipe_folder).parents[1]

    def set_version(self) -> None:
        header = load(self, str(self._checkout / "include/fa/version.h"))
        self.version = re.search(r'define FA_VERSION_STRING "(.*)"', header)[1]

    def export_sources(self) -> None:
        for file in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(self._checkout / file, self.export_sources_folder)
        for folder in ("cache", "cmake", "include", "src", "templates", "tools"):
            copy(self, "*", self._checkout / folder, Path(self.export_sources_folder) / folder)

    def config_options(self) -> None:
        if self.settings.os == "Windows":
            del self.options.fPIC

    def configure(self) -> None:
        if self.options.shared:
            self.options.rm_safe("fPIC")

    def layout(self) -> None:
        cmake_layout(self)

    def requirements(self) -> None:
        # Headers that the library is compiled with; nothing of them is in its interface.
        self.requires("fmt/[>=9 <12]", visible=False)
        self.requires("spdlog/[>=1.10 <2]", visible=False)
        self.requires("nlohmann_json/[>=3.11 <4]", visible=False)
        self.requires("xxhash/[>=0.8 <1]", visible=False)
        if self.options.tools:
            self.requires("cli11/[>=2.1 <3]", visible=False)

    def validate(self) -> None:
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("fa is for Linux")

    def generate(self) -> None:
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["FA_SHARED"] = bool(self.options.shared)
        toolchain.cache_variables["FA_BUILD_TOOLS"] = bool(self.options.tools)
        toolchain.cache_variables["FA_BUILD_TESTS"] = False
        toolchain.cache_variables["FA_BUILD_EXAMPLES"] = False
        toolchain.cache_variables["FA_WARNINGS_AS_ERRORS"] = False
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self) -> None:
        cmake = CMake(self)
        cmake.configure()  # the headers of a CUDA toolkit, 12.0 or later, are the machine's
        cmake.build()

    def package(self) -> None:
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")
        CMake(self).install()

    def package_info(self) -> None:
        # The package's own faConfig.cmake says what a static library takes.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/fa"]
        self.cpp_info.libs = ["fa"]
        if not self.options.shared:
            self.cpp_info.defines = ["FA_STATIC"]
            self.cpp_info.system_libs = ["dl", "m", "pthread", "stdc++"]
