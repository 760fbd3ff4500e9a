"""Settings for all tests."""

import os

from hypothesis import settings

# How long an example takes says nothing about right or wrong on a shared machine. In CI the examples are the same ones
# every time: there a failure means that the code changed; new examples are tried wherever else the tests run.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# What the user has downloaded is not for tests.
os.environ["EXPERT_THRESHOLD_CACHE"] = os.devnull
