"""What engines declare, side by side: ``.. profiles::`` is made from the profiles themselves. Adapters are asked without
their engines: an adapter imports its engine when it makes one."""

from importlib import import_module
from pkgutil import iter_modules

from ledger import Words, table
from sphinx.application import Sphinx

import optimized
import reference
import spec.conformance.adapters
from spec.engine import Capability, Profile
from spec.vocabulary import Config


def profiles() -> list[Profile]:
    """Those of our two engines, and the ``PROFILE`` of each adapter that has one."""
    ours = [engine.make_engine(Config(num_blocks=4)).profile for engine in (reference, optimized)]
    modules = [
        import_module(f"spec.conformance.adapters.{each.name}")
        for each in iter_modules(spec.conformance.adapters.__path__)
    ]
    found = [getattr(module, "PROFILE", None) for module in modules]
    return [*ours, *(profile for profile in found if isinstance(profile, Profile))]


class Profiles(Words):
    """One column an engine, one row a capability or a choice."""

    def text(self) -> str:
        found = profiles()
        rows = [
            (words(each.value), *("yes" if profile.can(each) else "no" for profile in found)) for each in Capability
        ]
        rows += [
            ("a block can be found", *(words(profile.publication.value) for profile in found)),
            ("which free block goes first", *(words(profile.eviction_order.value) for profile in found)),
            ("what admission can ask room for", *(admission(profile) for profile in found)),
            ("blocks that it keeps for itself", *(str(profile.num_reserved_blocks) for profile in found)),
            ("caches equal blocks", *(yes(profile.publishes_equal_blocks) for profile in found)),
            ("empties its cache only when idle", *(yes(profile.resets_idle_only) for profile in found)),
            ("runs in the order of admission, also by priority", *(yes(p.runs_in_admission_order) for p in found)),
            ("schedules a token that is still being drawn", *(yes(profile.schedules_ahead) for profile in found)),
        ]
        head = ("", *(profile.name for profile in found))
        return table(head, rows, (28, *(72 // len(found) for _ in found)))


def yes(choice: bool) -> str:
    return "yes" if choice else "no"


def words(value: str) -> str:
    return value.replace("_", " ")


def admission(profile: Profile) -> str:
    return ", ".join(words(rule.value) for rule in profile.admission_rules)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("profiles", Profiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
