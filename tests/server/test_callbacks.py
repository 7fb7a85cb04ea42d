"""The context of callbacks in a step, without a program: equations stand for it.

Callbacks in programs of servers are in ``test_server_faults``.
"""

import contextvars
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradxform._server.callbacks import Callbacks

VARIABLE = contextvars.ContextVar("of the thread that runs the program", default=0)


class Equation(types.SimpleNamespace):
    def replace(self, params):
        return Equation(**{**vars(self), "params": params})


def around(callbacks, callback):
    """The runtime calls this in place of a callback of two float32 and an int32."""
    types_of = (
        jax.core.ShapedArray((2,), jnp.float32),
        jax.core.ShapedArray((), "int32"),
    )
    outvars = [types.SimpleNamespace(aval=aval) for aval in types_of]
    equation = Equation(params={"callback": callback, "more": 1}, outvars=outvars)
    new = callbacks._around(equation)
    assert equation.params == {"callback": callback, "more": 1}
    assert new.params.keys() == {"callback", "more"}
    return new.params["callback"]


def test_a_callback_runs_in_the_context_of_the_program():
    callbacks = Callbacks(1)
    call = around(callbacks, lambda x: (x + 1, VARIABLE.get()))

    def program():
        return call(3)

    for number in (5, 6):
        token = VARIABLE.set(number)
        runs = callbacks.around(program)
        assert runs() == (4, number)
        VARIABLE.reset(token)
    assert call(3) == (4, 6)  # Also on another thread, which has other contexts.


def test_an_error_on_one_device_is_raised_at_once():
    def fails():
        raise ValueError("no number")

    with pytest.raises(ValueError, match="no number"):
        around(Callbacks(1), fails)()


def test_an_error_on_several_devices_is_raised_at_the_end_of_the_program():
    errors = [ValueError("no number"), ValueError("another"), None]

    def callback():
        if error := errors.pop(0):
            raise error
        return ["fine"]

    callbacks, seen = Callbacks(2), []
    call = around(callbacks, callback)

    def program():
        for _ in range(2 if len(errors) > 1 else 1):
            seen.append(call())
        return np.ones(1)

    run = callbacks.around(program)
    says = "^a callback of tx has failed, ValueError: no number$"
    with pytest.raises(jax.errors.JaxRuntimeError, match=says) as raised:
        run()
    assert str(raised.value.__cause__) == "no number"
    for zeros, number in seen:
        assert (zeros.tolist(), zeros.dtype, number) == ([0.0, 0.0], np.float32, 0)
        assert number.dtype == np.int32
    assert run().tolist() == [1.0]  # The errors are those of one run.
    assert seen[2:] == [["fine"]]


def test_a_program_without_callbacks_is_left_as_it_is():
    traced = jax.jit(lambda x: x + 1).trace(np.float32(1.0))
    assert Callbacks(1).inside(traced) is None
    plain = Equation(params={}, outvars=[])
    assert Callbacks(1)._around(plain) is plain
    other = Equation(params={"callback": "no function"}, outvars=[])
    assert Callbacks(1)._around(other) is other
