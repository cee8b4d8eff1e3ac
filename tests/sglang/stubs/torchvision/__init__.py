"""Stands in for torchvision, whose published builds want CUDA, where only text models are served.

SGLang and transformers import it for picture models that are never used. Every submodule is there, every
public name in it is an empty class, and every public attribute of such a class is its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.0.0"  # asked for by transformers, which compares it


def _refuse_dunder(name: str) -> None:
    """Python itself asks for these, to find out what is not there."""
    if name.startswith("__"):
        raise AttributeError(name)


class _Names(type):
    """The class of the placeholders: an enumeration's members are read while modules are imported."""

    def __getattr__(cls, name: str) -> str:
        _refuse_dunder(name)
        return name


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        _refuse_dunder(name)
        return _Names(name, (), {})


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, _Submodules())
