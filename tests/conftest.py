"""Settings for all tests."""

from hypothesis import settings

# How long an example takes says nothing about right or wrong on a shared machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
