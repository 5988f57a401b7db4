#!/usr/bin/env python3
"""Models of one node, ONNX Runtime's LinearAttention: onnx_models.py <folder> <heads>... writes <rule>_<heads>.onnx.

Needs python3-onnx. The operator is of the domain com.microsoft, whose schemas the runtime has, not this package:
nothing here checks the node. Shapes are left open, and with them whether decays are per head or per feature.
"""
import pathlib
import sys

from onnx import TensorProto, helper

RULES = ("linear", "gated", "delta", "gated_delta")


def model(rule, heads):
    def value(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    inputs = ["query", "key", "value", "past_state"]
    inputs.append("decay" if "gated" in rule else "")
    inputs.append("beta" if "delta" in rule else "")
    while not inputs[-1]:  # optional inputs that come last are left out, the others are empty names
        inputs.pop()
    node = helper.make_node("LinearAttention", inputs, ["output", "present_state"], domain="com.microsoft",
                            q_num_heads=heads, kv_num_heads=heads, update_rule=rule)
    graph = helper.make_graph([node], rule, [value(name) for name in inputs if name],
                              [value("output"), value("present_state")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def main(folder, *heads):
    for rule in RULES:
        for h in heads:
            (pathlib.Path(folder) / f"{rule}_{h}.onnx").write_bytes(model(rule, int(h)).SerializeToString())


if __name__ == "__main__":
    main(*sys.argv[1:])
