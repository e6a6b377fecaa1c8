"""Size constants of the PyTorch caching allocator, in bytes.

Source: torch c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp; the same in 2.6 to 2.15.
"""

from memcalc.allocator.sizes import MIB

MIN_BLOCK = 512  # kMinBlockSize: every block is a multiple of it
SMALL_REQUEST = MIB  # kSmallSize: the largest request, after rounding, that the small pool serves
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: every segment of the small pool, and its page in an expandable segment
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer: segments for requests below MADE_TO_MEASURE (option since 2.11)
MADE_TO_MEASURE = 10 * MIB  # kMinLargeAlloc: from here on a segment is as large as its first request needs
SEGMENT_STEP = 2 * MIB  # kRoundLarge: segments for requests from MADE_TO_MEASURE on are multiples of it
UNSPLIT_REST = MIB  # kSmallSize again: the remainder of a large block is split off only if larger than this
# An expandable segment reserves addresses for 9/8 of the device's memory, so that pages can be moved to its end.
HEADROOM = 8

ROUNDUP_SLOTS = 16  # kRoundUpPowerOfTwoIntervals: one for each power of two from 1 MiB, the last one open-ended
LARGEST_REQUEST = 2**60  # one exabyte: for larger requests the allocator does not even call the driver
STREAM_SHIFT = 96  # in encoded requests the number of the CUDA stream is above the size; no run reaches 2^96 bytes
SIZE_MASK = (1 << STREAM_SHIFT) - 1  # the bits of an encoded request without its stream
