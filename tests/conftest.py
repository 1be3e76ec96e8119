"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# Many of the properties start a bus or touch files for each example; what they found came within the first dozens.
settings.register_profile("trainbus", max_examples=50, deadline=None)
settings.load_profile("trainbus")
