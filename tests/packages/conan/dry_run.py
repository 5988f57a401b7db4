"""Runs the recipe where Conan is not at hand: dry_run.py <folder> <version>.

What it takes from Conan are stand-ins; its methods are called in the order of `conan create`, and away from the sources
once it is exported. <folder>/package is what Conan would keep, <folder>/generators what its CMakeDeps would write for
test_package, from the recipe's own words.
"""

import fnmatch
import importlib.util
import pathlib
import shutil
import sys
import types

here = pathlib.Path(__file__).parent
scratch, version = pathlib.Path(sys.argv[1]), sys.argv[2]
minimum_standards = []


def copy(_, pattern, src, dst):
    for path in pathlib.Path(src).rglob("*"):
        name = path.relative_to(src)
        if path.is_file() and fnmatch.fnmatch(str(name), pattern):
            target = pathlib.Path(dst) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


class ConanFile:
    def __init__(self):
        self.properties = {}
        self.cpp_info = types.SimpleNamespace(
            includedirs=["include"], bindirs=["bin"], libdirs=["lib"], set_property=self.properties.__setitem__)
        self.info = {"settings": "of one machine"}
        self.settings = types.SimpleNamespace(get_safe={"compiler.cppstd": "20"}.get)
        self.required = []

    def requires(self, reference, **traits):
        self.required.append((reference, traits))


def stand_in(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


stand_in("conan", ConanFile=ConanFile)
stand_in("conan.tools")
stand_in("conan.tools.build", can_run=None, check_min_cppstd=lambda _, standard: minimum_standards.append(standard))
stand_in("conan.tools.cmake", CMake=None, cmake_layout=None)
stand_in("conan.tools.files", copy=copy, load=lambda _, path: pathlib.Path(path).read_text())


def load_class(path, name):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def require(condition, sentence):
    if not condition:
        sys.exit(f"conanfile.py: {sentence}")


sys.dont_write_bytecode = True
shutil.rmtree(scratch, ignore_errors=True)
recipe = load_class(here / "conanfile.py", "LinattnConan")()
load_class(here / "test_package" / "conanfile.py", "LinattnTestConan")

recipe.recipe_folder = str(here)
recipe.export_sources_folder = str(scratch / "export")
recipe.set_version()
recipe.export_sources()

recipe.recipe_folder = str(scratch / "cache")  # nothing is there
recipe.source_folder = recipe.export_sources_folder
recipe.package_folder = str(scratch / "package")
recipe.requirements()
recipe.validate()
recipe.package()
recipe.package_id()
recipe.package_info()

sources = {str(path.relative_to(here.parents[2])) for path in (here.parents[2] / "include").rglob("*.hpp")}
package = {str(path.relative_to(scratch / "package")) for path in (scratch / "package").rglob("*") if path.is_file()}
modules = recipe.properties["cmake_build_modules"]
require(recipe.version == version, f"the version is {recipe.version}, not {version}")
require(package == sources | {"licenses/LICENSE", *modules}, f"packages other files: {sorted(package ^ sources)}")
require(recipe.package_type == "header-library" and not recipe.info, "a package of headers depends on no setting")
require(not recipe.cpp_info.bindirs and not recipe.cpp_info.libdirs, "headers have no bin and lib")
require(recipe.required == [("eigen/[>=3.4 <6]", {"transitive_headers": True})], f"requires {recipe.required}")
require(minimum_standards == [20], "does not ask for C++20")

include_dir = scratch / "package" / recipe.cpp_info.includedirs[0]
(scratch / "generators").mkdir()
(scratch / "generators" / f"{recipe.name}-config.cmake").write_text(f"""
find_package(Eigen3 CONFIG REQUIRED)
add_library({recipe.name}::{recipe.name} INTERFACE IMPORTED)
target_include_directories({recipe.name}::{recipe.name} INTERFACE {include_dir})
target_link_libraries({recipe.name}::{recipe.name} INTERFACE Eigen3::Eigen)
""" + "".join(f"include({scratch / 'package' / module})\n" for module in modules))
