"""vcpkg.json keeps its schema and has the version of the library: check_manifest.py <version>."""

import json
import pathlib
import sys

import jsonschema

here = pathlib.Path(__file__).parent
validator = jsonschema.Draft7Validator(json.loads((here / "manifest.schema.json").read_text()))
manifest = json.loads((here / "linattn" / "vcpkg.json").read_text())

errors = [f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(manifest)]
if manifest["name"] != "linattn" or manifest["version-semver"] != sys.argv[1]:
    errors.append(f"{manifest['name']} {manifest['version-semver']} is not linattn {sys.argv[1]}")

# A schema that lets anything pass would be no check.
for change in {"name": "Linattn"}, {"version": "0.1.0"}, {"dependencies": [{"host": True}]}, {"licence": "MIT"}:
    if validator.is_valid(manifest | change):
        errors.append(f"the schema accepts {change}")
sys.exit("\n".join(errors) or 0)
