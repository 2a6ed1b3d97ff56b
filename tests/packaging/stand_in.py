"""A Conan package of one of fa's dependencies, made of the headers that the system has: the recipe of fa can be run where
no remote answers. NAME and VERSION come from `conan create --name --version`; targets are those of ConanCenter's recipes."""

from pathlib import Path

from conan import ConanFile
from conan.tools.files import copy

HEADERS = {
    "fmt": ("fmt/*", "fmt::fmt-header-only"),
    "spdlog": ("spdlog/*", "spdlog::spdlog_header_only"),
    "nlohmann_json": ("nlohmann/*", "nlohmann_json::nlohmann_json"),
    "xxhash": ("xxh*.h", "xxHash::xxhash"),
    "cli11": ("CLI/*", "CLI11::CLI11"),
}
FILES = {"cli11": "CLI11", "xxhash": "xxHash"}


class StandIn(ConanFile):
    options = {"header_only": [True, False]}
    default_options = {"header_only": True}

    def package(self) -> None:
        pattern, _ = HEADERS[self.name]
        folder = Path("/usr/include")
        if not list(folder.glob(pattern)):
            raise FileNotFoundError(f"{folder / pattern}")
        copy(self, pattern, folder, Path(self.package_folder) / "include")

    def package_info(self) -> None:
        self.cpp_info.set_property("cmake_file_name", FILES.get(self.name, self.name))
        self.cpp_info.set_property("cmake_target_name", HEADERS[self.name][1])
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
