"""The sizes that PyTorch's caching allocator is built on, in bytes.

Source: torch c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp; the same in 2.6 to 2.15.
"""

from memcalc.allocator.sizes import MIB

MIN_BLOCK = 512  # kMinBlockSize: every block is a multiple of it
SMALL_REQUEST = MIB  # kSmallSize: the largest request, after rounding, that goes to the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: every segment of the small pool, and its page in an expandable segment
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: segments for requests below MADE_TO_MEASURE (option since 2.11)
MADE_TO_MEASURE = 10 * MIB  # kMinLargeAlloc: from here on a segment is as large as its first request needs
SEGMENT_STEP = 2 * MIB  # kRoundLarge: segments made to measure are multiples of it
UNSPLIT_REST = MIB  # kSmallSize again: a large block's rest is split off only when it is larger than this
# An expandable segment has addresses for the whole device and an eighth of it, so that pages can be moved to the end.
HEADROOM = 8

ROUNDUP_SLOTS = 16  # kRoundUpPowerOfTwoIntervals: one for each power of two from 1 MiB, the last one open
LARGEST_REQUEST = 2**60  # one exabyte: asked for more, the allocator does not even try
STREAM_SHIFT = 96  # in scripts of requests the number of the CUDA stream stands above the size, which no run reaches
