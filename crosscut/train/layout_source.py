"""The layout of a command line: the tables of a config file or of `--layout FILE`, adjusted by flags. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crosscut.layout.cuts import normal_cuts
from crosscut.layout.errors import LayoutError, nearest
from crosscut.layout.layout import SECTIONS, Layout
from crosscut.train import toml

# Flags without a section, and which table of the layout each changes.
SHORT_LAYOUT_FLAGS = {
    "mesh": "mesh",
    "zero": "store",
    "sp": "cuts",
    "schedule": "schedule",
    "micro_batches": "schedule",
}


class LayoutSource:
    """Collects where the layout comes from, then makes it. `origins` maps each table to its source."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.flags: dict[str, Any] = {}
        self.cuts: dict[str, Any] = {}  # single cuts by flag: they hold on whatever mesh the other flags lead to
        self.cuts_source = ""
        self.origins: dict[str, str] = {}

    def take_tables(self, tables: Mapping[str, Any], source: str) -> None:
        """The layout tables of a file: they replace those of a weaker source as a whole."""
        if not tables:
            return
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                raise LayoutError(f"{source}: {name} = {table!r} must be a section: [{name}]")
        self.tables = {name: dict(table) for name, table in tables.items()}
        self.origins = dict.fromkeys(tables, source)
        if "mesh" in tables and "cuts" not in tables:
            self.origins["cuts"] = f"the usual cuts of the mesh in {source}"

    def take_file(self, path: str) -> None:
        """A layout file (`--layout`), or the layout tables of a config file."""
        tables = toml.read(path)
        known = {name: table for name, table in tables.items() if name in SECTIONS}
        if not known:
            raise LayoutError(f"{path}: no layout in it; a layout file has a [mesh] section")
        self.tables = {}
        self.take_tables(known, path)

    def take_key(self, table: str, key: str, value: Any, source: str) -> None:
        """One key of one table, from `--table.key value`."""
        known = SECTIONS[table]
        if known and key not in known:
            raise LayoutError(f"{source}: unknown key {table}.{key}{nearest(key, known)}")
        if table == "cuts":
            if isinstance(value, str):  # "cp,tp" is a list; "none" leaves the dim whole
                value = [axis.strip() for axis in value.split(",") if axis.strip() not in ("", "none")]
            self.cuts[key] = value
            self.cuts_source = source
            return
        self.tables.setdefault(table, {})[key] = value
        self.origins[table] = source

    def take_flag(self, name: str, value: Any) -> None:
        """A short flag: `mesh`, `zero`, `sp`, `schedule` or `micro_batches`; the value may still be text."""
        flag = "--" + name.replace("_", "-")
        if name in ("zero", "micro_batches") and not isinstance(value, int):
            try:
                value = int(value)
            except ValueError:
                raise LayoutError(f"{flag} {value}: must be a whole number") from None
        if name == "sp" and isinstance(value, str):
            if value not in ("true", "false"):
                raise LayoutError(f"{flag} {value}: must be true or false")
            value = value == "true"
        self.flags[name] = value

    def resolve(self, world_size: int | None) -> Layout:
        """The layout. Without a mesh anywhere it is one rank, or dp over all of `world_size`."""
        tables = {name: dict(table) for name, table in self.tables.items()}
        mesh = self.flags.get("mesh")
        if mesh is not None and "mesh" in tables:
            # Replaced below; "auto" in it need not be known.
            tables["mesh"] = {axis: 1 if size == "auto" else size for axis, size in tables["mesh"].items()}
        elif "mesh" not in tables and mesh is None and world_size is not None and world_size > 1:
            tables["mesh"] = {"dp": world_size}
            self.origins["mesh"] = "the world size"
        base = Layout.from_dict(tables, world_size if mesh is None else None)
        layout = base.adjusted(**self.flags, world_size=world_size)
        for name in self.flags:
            self.origins[SHORT_LAYOUT_FLAGS[name]] = "--" + name.replace("_", "-")
        if mesh is not None and (layout.cuts != base.cuts or "cuts" not in self.origins):
            self.origins["cuts"] = "the usual cuts of --mesh" + (" and --sp" if self.flags.get("sp") else "")
        if self.cuts:
            layout = replace(layout, cuts=normal_cuts({**layout.cuts, **self.cuts}, layout.mesh))
            self.origins["cuts"] = self.cuts_source
        return layout
