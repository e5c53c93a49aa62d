"""Python imports this at its start, from PYTHONPATH: hides the packages in MISSING, as if they were not installed."""

import os
import re
import sys


class _Without:
    """A finder that finds neither these modules nor their metadata."""

    def __init__(self, finder, modules, packages):
        self._finder, self._modules, self._packages = finder, modules, packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._modules:
            return None
        return self._finder.find_spec(name, path, target)

    def find_distributions(self, *args):
        for found in getattr(self._finder, "find_distributions", lambda *args: ())(*args):
            if re.sub("[-_.]+", "-", found.metadata["Name"] or "").lower() not in self._packages:
                yield found

    def __getattr__(self, name):
        return getattr(self._finder, name)


_modules, _packages = (set(names.split()) for names in os.environ["MISSING"].split(","))
sys.meta_path[:] = [_Without(finder, _modules, _packages) for finder in sys.meta_path]
