"""The C++ of an exported file: specialised kernels in namespaces of their own, and a host function per direction."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from haloconv.export.record import WORKSPACE, Address, Clear, LaunchRecord, MapRecord, Step, Tape, Value
from haloconv.jit import DataType, KernelSource, Swizzle, family_sources
from haloconv.jit.source import SOURCE_ROOT, kernel_path

LINE_WIDTH = 118

_INDENT = "           "
_LEFT_OUT = re.compile(r"^\s*#\s*pragma\s+once\s*\n+", re.MULTILINE)


class NamedKernel(NamedTuple):
    """A specialised kernel and the namespace that it gets."""

    namespace: str
    source: KernelSource

    @property
    def file(self) -> str:
        """The path of its .cu file in the package."""
        return f"{kernel_path(self.source.kernel)}.cu"


def kernel_files(sources: Iterable[KernelSource]) -> dict[str, str]:
    """Every file of the kernels by its name, headers before those that include them.

    Entries lose C linkage: one kernel may be there twice, with other constants and in another namespace.
    """
    files: dict[str, str] = {}
    for kernel in dict.fromkeys(source.kernel for source in sources):
        for path in reversed(family_sources(kernel)):
            text = _LEFT_OUT.sub("", path.read_text(encoding="utf-8")).replace('extern "C" ', "")
            files.setdefault(path.relative_to(SOURCE_ROOT).as_posix(), text)
    return files


def constants(source: KernelSource) -> str:
    """The constants as the inside of a Python dict."""
    return ", ".join(f'"{name}": {_literal(value)}' for name, value in source.constants)


def _literal(value: int | str) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if value >= 0 else f'"({value})"'


def named_kernels(functions: dict[str, Tape]) -> list[NamedKernel]:
    """The kernels of all tapes, each once, named after the function that launches it first."""
    named: dict[str, NamedKernel] = {}
    taken: set[str] = set()
    for function, tape in functions.items():
        for launch in tape.launches:
            source = launch.source
            if source.digest in named:
                continue
            wanted = function if source.entry.endswith(function.rpartition("_")[2]) else f"{function}_{source.entry}"
            count = 1 + sum(re.fullmatch(rf"{wanted}(_\d+)?_kernel", name) is not None for name in taken)
            namespace = f"{wanted}_kernel" if count == 1 else f"{wanted}_{count}_kernel"
            taken.add(namespace)
            named[source.digest] = NamedKernel(namespace, source)
    return list(named.values())


def host_function(name: str, comment: str, tape: Tape, kernels: Iterable[NamedKernel]) -> str:
    """The C++ function that does what the tape says. It takes addresses and a stream, all as int64_t."""
    namespaces = {kernel.source.digest: kernel.namespace for kernel in kernels}
    body = "\n".join(_statement(step, namespaces) for step in tape.steps)
    return f"// {comment}\n{signature(name, tape)} {{\n{body}\n}}\n"


def signature(name: str, tape: Tape) -> str:
    """The declaration of the function, without the semicolon."""
    names = (*tape.operands, tape.result, WORKSPACE, "stream")
    return f"void {name}({', '.join(f'int64_t {each}' for each in names)})"


def _statement(step: Step, namespaces: dict[str, str]) -> str:
    if isinstance(step, Clear):
        at = _address(step.address)
        return f"    clear({at}, {step.size_bytes}, stream);"
    source = step.source
    kernel = f"{namespaces[source.digest]}::{source.entry}"
    grid, threads, smem_bytes, cluster = step.shape
    how = f"{grid}, {threads}, {smem_bytes}" if cluster == 1 else f"{grid}, {threads}, {smem_bytes}, {cluster}"
    launch = "launch" if cluster == 1 else "launch_clusters"
    words = f'{launch}("{source.entry}", {kernel}, {how}, stream,'
    head = textwrap.fill(words, LINE_WIDTH, initial_indent="    ", subsequent_indent=_INDENT, break_long_words=False)
    return f"{head}\n{_arguments(step)});"


def _arguments(launch: LaunchRecord) -> str:
    """The initialiser of the kernel's struct: its fields in order, inner structs without braces of their own."""
    lines: list[str] = []
    words: list[str] = []
    for field, value in launch.arguments:
        if field.is_map:
            lines += [f"{_INDENT} {line}" for line in _map(value if isinstance(value, MapRecord) else None, field.name)]
        else:
            words.append(f"/*\0{field.name}\0*/\0{_value(value)}")
    folded = textwrap.wrap(
        ", ".join(words), LINE_WIDTH - len(_INDENT) - 4, break_long_words=False, break_on_hyphens=False
    )
    lines += [f"{_INDENT} {line}" for line in folded]
    text = "\n".join(lines).replace("\0", " ")
    return f"{_INDENT}{{{text[len(_INDENT) + 1 :]}}}"


def _value(value: Value) -> str:
    if value is None:
        return "nullptr"
    if isinstance(value, Address):
        return _address(value)
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _address(address: Address) -> str:
    return f"Address{{{address.tensor}}}" if not address.offset else f"Address{{{address.tensor} + {address.offset}}}"


def _map(value: MapRecord | None, name: str) -> list[str]:
    """The lines of a tensor map's argument."""
    if value is None:
        return [f"/* {name} */ {{}},"]
    data_type = f"CU_TENSOR_MAP_DATA_TYPE_{DataType(value.data_type).name}"
    swizzle = Swizzle(value.swizzle).name
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{swizzle if swizzle == 'NONE' else swizzle[1:] + 'B'}"
    extents, strides, box = (
        "{" + ", ".join(map(str, each)) + "}" for each in (value.extents, value.strides, value.box)
    )
    if value.pixels is not None:
        corners = ("{" + ", ".join(map(str, each)) + "}" for each in value.pixels)
        return [
            f"/* {name} */ pixel_map({data_type}, {_address(value.address)}, /* extents */ {extents},",
            f"    /* strides */ {strides}, /* channels, pixels */ {box},",
            f"    /* corners, steps */ {', '.join(corners)}, {swizzle}),",
        ]
    return [
        f"/* {name} */ box_map({data_type}, {_address(value.address)}, /* extents */ {extents},",
        f"    /* strides */ {strides}, /* box */ {box},",
        f"    {swizzle}),",
    ]
