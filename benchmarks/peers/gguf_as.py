"""A GGUF file with the same weights in another number format: `gguf_as.py SOURCE TARGET F32|F16|BF16`.

Runs in llama.cpp's environment (package gguf). Vectors stay float32, as llama.cpp's own converter keeps them.
"""

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

FILE_TYPES = {"F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16}
REWRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, target: Path, number: str) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in REWRITTEN:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(FILE_TYPES[number])
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        wanted = GGMLQuantizationType[number if weights.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, quantize(weights, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    partial = Path(sys.argv[2] + ".partial")
    convert(Path(sys.argv[1]), partial, sys.argv[3])
    partial.replace(sys.argv[2])
