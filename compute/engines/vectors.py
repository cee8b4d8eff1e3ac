"""Vectors of eight float32 as values inside functions that numba compiles.

The compiler turns plain loops into vector code only when it can prove enough about them, and keeps no sums
in registers across a loop over memory. These few operations say it directly. Eight fit one register of any
x86 processor with AVX; others take two or more per vector. Offsets count floats from an array's first
element and are not checked. Called by the kernels only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

WIDTH = 8
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)
_FLOAT_ALIGN = 4  # bytes; rows of odd lengths start anywhere


class _Floats(types.Type):
    """The numba type of a vector."""


_floats = _Floats(name="floats8")


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def _spread(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * WIDTH))


@intrinsic
def load(typing: Any, array: Any, offset: Any) -> Any:
    """Returns the eight floats from an offset on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=_FLOAT_ALIGN)

    return _floats(array, types.intp), generate


@intrinsic
def store(typing: Any, array: Any, offset: Any, vector: Any) -> Any:
    """Writes eight floats from an offset on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _VECTOR.as_pointer()), align=_FLOAT_ALIGN)
        return context.get_dummy_value()

    return types.void(array, types.intp, _floats), generate


@intrinsic
def spread(typing: Any, number: Any) -> Any:
    """Returns a float in all eight places."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0])

    return _floats(types.float32), generate


@intrinsic
def spread_from(typing: Any, array: Any, offset: Any) -> Any:
    """Returns the float at an offset in all eight places."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return _spread(builder, builder.load(pointer, align=_FLOAT_ALIGN))

    return _floats(array, types.intp), generate


def _elementwise(build: Callable[..., Any], num_args: int, doc: str) -> Any:
    """Returns an operation on vectors; `build(builder, *vectors)` writes its instruction."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return build(builder, *args)

    signature = _floats(*[_floats] * num_args)
    typers: dict[int, Callable[..., Any]] = {
        1: lambda typing, a: (signature, generate),
        2: lambda typing, a, b: (signature, generate),
        3: lambda typing, a, b, c: (signature, generate),
    }
    operation = intrinsic(typers[num_args])
    operation.__doc__ = doc
    return operation


def _select_larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _select_smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _call(builder: Any, name: str, result: Any, operands: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    """Returns the result of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, operands, fastmath=fastmath)


def _fuse(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{WIDTH}f32", _VECTOR, [a, b, c])


def _swap(builder: Any, a: Any) -> Any:
    order = [place ^ 1 for place in range(WIDTH)]
    return builder.shuffle_vector(a, a, ir.Constant(_INTS, order))


def _shift_exponent(builder: Any, a: Any) -> Any:
    bits = builder.shl(builder.bitcast(a, _INTS), ir.Constant(_INTS, [23] * WIDTH))
    return builder.bitcast(builder.add(bits, ir.Constant(_INTS, [127 << 23] * WIDTH)), _VECTOR)


add = _elementwise(lambda builder, a, b: builder.fadd(a, b), 2, "Returns a + b.")
subtract = _elementwise(lambda builder, a, b: builder.fsub(a, b), 2, "Returns a - b.")
multiply = _elementwise(lambda builder, a, b: builder.fmul(a, b), 2, "Returns a · b.")
divide = _elementwise(lambda builder, a, b: builder.fdiv(a, b), 2, "Returns a / b.")
multiply_add = _elementwise(_fuse, 3, "Returns a · b + c, rounded once.")
larger = _elementwise(_select_larger, 2, "Returns the larger of a and b; b where either is not a number.")
smaller = _elementwise(_select_smaller, 2, "Returns the smaller of a and b; b where either is not a number.")
swap_pairs = _elementwise(_swap, 1, "Returns a with each two neighbours exchanged.")
_power_of_two = _elementwise(
    _shift_exponent, 1, "Returns 2ⁿ for a whole number n that was added to _SHIFTER."
)


def _reduction(name: str, doc: str, starts: bool) -> Any:
    """Returns an operation from a vector to a float; sums start from a number, in any order."""

    def typer(typing: Any, a: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            operands = [ir.Constant(_FLOAT, -0.0), args[0]] if starts else [args[0]]
            return _call(builder, name, _FLOAT, operands, fastmath=("reassoc",))

        return types.float32(_floats), generate

    operation = intrinsic(typer)
    operation.__doc__ = doc
    return operation


total = _reduction(f"llvm.vector.reduce.fadd.v{WIDTH}f32", "Returns the sum of the eight floats.", True)
largest = _reduction(
    f"llvm.vector.reduce.fmax.v{WIDTH}f32", "Returns the largest of the eight floats.", False
)

# adding 1.5 · 2²³ to a float rounds it to a whole number, which then stands in its lowest bits
_SHIFTER = np.float32(1.5 * 2**23)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(-0.693359375)  # few bits, so that n · _LN2_HIGH is exact
_LN2_LOW = np.float32(0.693359375 - 0.6931471805599453)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)  # within these neither 2ⁿ nor the result overflows
_I2, _I3, _I4, _I5, _I6, _I7 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720, 5040))
_ONE = np.float32(1.0)


@njit
def exponential(vector: Any) -> Any:
    """Returns eˣ with a relative error below 2⁻²²; arguments are held within -87 and 88.

    x = n·ln 2 + r with whole n and |r| ≤ ln 2 / 2, then eˣ = 2ⁿ · (Taylor series of eʳ to r⁷).
    """
    x = smaller(spread(_HIGHEST), larger(spread(_LOWEST), vector))
    shifted = multiply_add(x, spread(_LOG2_E), spread(_SHIFTER))
    whole = subtract(shifted, spread(_SHIFTER))
    rest = multiply_add(whole, spread(_LN2_HIGH), x)
    rest = multiply_add(whole, spread(_LN2_LOW), rest)
    series = multiply_add(rest, spread(_I7), spread(_I6))
    series = multiply_add(rest, series, spread(_I5))
    series = multiply_add(rest, series, spread(_I4))
    series = multiply_add(rest, series, spread(_I3))
    series = multiply_add(rest, series, spread(_I2))
    series = multiply_add(rest, series, spread(_ONE))
    series = multiply_add(rest, series, spread(_ONE))
    return multiply(series, _power_of_two(shifted))
