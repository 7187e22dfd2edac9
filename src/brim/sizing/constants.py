"""Every number that a size is decided by, in one table, each with its reason.

Figures behind them: docs/measurements/search.md (probing), eval.md and train_video.md (live work), forecast.md. What is
named in a comment as seen was seen on an H200 unless it says otherwise.
"""

from __future__ import annotations

# --- Memory under the limit -------------------------------------------------------------------------------------------
USABLE_LIMIT_FRACTION = 0.97  # a caching allocator retries before it fails: this much of the limit is filled on purpose
ROOMY_LIMIT_FRACTION = 0.85  # live work that compares with one far larger size leaves this room for noise
ALLOCATOR_NOISE = 0.01  # reserved bytes stray this much from a smooth curve
ALLOCATOR_RESOLUTION = 0.02  # so a largest size known to 2 % is exact enough on such a device
OWN_BYTES_FRACTION = 0.9  # of the largest batch since the cache was given back: a smaller one reads that one's bytes

# --- The first size ---------------------------------------------------------------------------------------------------
FIRST_ITEMS = 2  # of the costliest: one sample may be a special case (batch normalisation), two fit almost always
# Of the free bytes that a first batch takes by a forecast. Compute and memory of a card go together, so that this is
# near where larger batches stop being faster; it leaves a forecast room to be wrong, and a climb two steps.
FIRST_LIMIT_FRACTION = 1 / 16
NEIGHBOUR_LIMIT_FRACTION = 0.75  # of the free bytes, by another knob value's batches: a guess, and rising costs nothing
MAX_FORECAST_ERROR = 2.0  # a forecast that its first batch shows to be off by more than this factor is dropped
FEWEST_BATCHES = 4  # a size that would leave fewer batches than this is not searched for: it has no time to pay
STEEPEST_ITEM_GROWTH = 2.0  # bytes of an item grow at most with the square of its cost (unfused attention)
USUAL_ITEM_GROWTH = 1.5  # and at least like this: a part that grows with the square shows only once it is large
MAX_CARRIED_COST_RATIO = 1.5  # items that differ by more in cost say nothing about each other's sizes
BELOW_SIZE_LIMIT = 0.9  # of a size that met a kernel's limit under another knob value

# --- Whether a forecast pays before live work ------------------------------------------------------------------------
# A trace takes about as long as this many decode steps; it pays where the small batches that it spares take twice as
# many. A climb from two samples by fours needs about four batches to where it would have started.
TRACE_DECODE_STEPS = 256
MOST_SPARED_BATCHES = 4
SHORT_RUN_SAMPLES = 8  # the first batch of two is a quarter of such a run, and so as large as it gets
# Or the run is so long that nobody sees the trace: no card computes faster than this, and none so fast in practice.
FASTEST_FLOPS = 1e15  # floating-point operations a second
LONG_RUN_SECONDS = 60.0
POSITIONS_OF_A_SAMPLE = 128  # at least, in a picture or a clip: how often a sample uses each weight
TRACED_SAMPLES = (2, 8)  # whose bytes are worked out first; these are also the sizes that are traced

# --- A plan from the cache --------------------------------------------------------------------------------------------
MIN_LIMIT_OF_PLAN = 0.9  # with less than this of the plan's limit it was made for another card
MORE_ROOM_THAN_PLAN = 1.1  # with more than this of it, the card was crowded when the plan was made: search again
MAX_SIZE_OVER_SEEN = 4  # a size found on a run's own batches is never further above the largest that ran

# --- Probing for the fastest size -------------------------------------------------------------------------------------
CLEARLY_SMALLER = 0.5  # of the best size: speed is not given up for less memory than that spares
MOST_KNEE_PROBES = 1  # one probe moves the knee down as far as a second one would, on all stored curves but one
MOST_FAILED_CLIMBS = 4  # sizes near the limit that may fail before the search ends
SECOND_LEAP = 64  # the second size is at most this many times the first
LATER_LEAP = 16  # and every later one this many times the largest that fits
LONGEST_LOOK_SECONDS = 1.0  # near the limit, only to know the largest size, a step may take this long
LONGEST_STEP_SECONDS = 10.0  # a longer step is not worth a probe, unless small sizes take as long
FORECAST_REACH = 0.9  # of the limit, for the second size with a forecast that its first one has corrected
FIRST_REPLAY_PART = 16  # of a size that leaves some of the limit: so far above it a replay under the limit begins
FORECAST_RESOLUTION = 100  # a size near the limit is worked out to one part in so many
SECOND_REPLAY_HEADROOM = 0.05  # what runs with this much free as well has not just been lucky
TRUSTED_ALLOCATED_ERROR = 0.03  # a forecast that is this near at the largest size seen, be it the first, in use …
TRUSTED_RESERVED_ERROR = 0.2  # … and reserved, decides how near the limit a probe goes
STEP_BACK = 0.08  # of the gap below a size that failed near the limit
STEP_BACK_SURPRISED = 0.5  # of the gap, where the failure was not expected
WORTH_A_CLIMB = 1.1  # times the largest size that fits: what is nearer is not probed
WORTH_A_CLIMB_AFTER_FORECAST = 1.05  # which has led near the limit, but not quite
KNEE_ABOVE = 1.1  # times the size below the knee, and …
KNEE_BELOW = 0.85  # … of the good size above it: between these a probe adds information
KNEE_SPARES = 0.05  # of the limit: a smaller size that spares less is not worth a probe

# --- Probing for the largest size -------------------------------------------------------------------------------------
# Bisection alone settles any curve up to 4,096 in 13 probes; once a failing size is known, proposals are kept where
# bisection could still finish within this many probes in all.
PROBE_ALLOWANCE = 14
LONGEST_BLIND_LEAP = 2048  # with two points known: half of that allowance's range

# --- A step that raises at some sizes ---------------------------------------------------------------------------------
LARGER_SIZES_TRIED = 2  # above one at which the step raised, before its error is believed
ROUND_SIZES = (2, 4, 8)  # what sizes may have to be multiples of, as --multiple-of then says

# --- Live work: growing -----------------------------------------------------------------------------------------------
LEAP_FACTOR = 4  # while a batch's time hardly depends on its size
LEAP_RATE = 0.75  # of the growth in size: a rate that rises by more than this says that time hardly rises
MIN_SPEEDUP_TO_CLIMB = 1.3  # a step up that brings this much is believed at once; with less, sizes are compared
MIN_SPEEDUP_TO_GROW = 1.03  # a doubling that brings less than this is not worth its memory
FAR_ENOUGH = 1.2  # times the doubling just tried: what is nearer is not compared again
REOPEN_ITEM_COST = 0.6  # of the costliest item when it settled: from here on sizes are compared again

# --- Live work: comparing two sizes -----------------------------------------------------------------------------------
COMPARED_BATCHES = 2  # at the larger size; the better one counts, since the first also allocates
EARLY_SECONDS = 2.0  # of the batches timed, where items are alike: until then the host may have other work …
EARLY_COMPARED_BATCHES = 8  # … so more are timed
FASTER_NOW = 1.02  # times a size's rate when it was first seen: what was compared with that is compared again …
MOST_DOUBTS = 2  # … so often
TIMED_SECONDS = 0.1  # a micro-batch size is timed for so long: short steps several times, and the best one counts
MOST_TIMED_STEPS = 4

# --- Live work: after a failure ---------------------------------------------------------------------------------------
QUIET_BATCHES = 8  # without a failure before the size may grow again
FORGIVING_BATCHES = 64  # without a failure before a failed size may be approached again …
FORGIVEN_GROWTH = 1.25  # … by moving what counts as failed up by this
FORGIVEN_GOAL = 0.8  # of what counts as failed then
SHORT_OF_MEMORY = 0.9  # of a size at which the allocator had to give back its cache
RETRYING_STEPS = 3  # in a row in which it did: once or twice is putting the cache in order
MOST_CUTS = 3  # for that: lengths that change from step to step may cost a retry at any size
MOST_CALM_READINGS = 64  # with enough free memory, before a size returns that other processes have repeatedly displaced

# --- A whole function at a falling size -------------------------------------------------------------------------------
LEAST_FALL = 0.9  # of a size that failed: what is nearer to it fails as well, most often
MOST_FALL = 0.5  # of it at most in one go: a function that has returned is not run again, larger sizes are lost
SMALLER_BY = 0.75  # of the size before: a step that fills memory bit by bit must come further at such a size …
FURTHER = 1.2  # … at least by this factor; one that does not has met the place that needs most

# --- A generation pool ------------------------------------------------------------------------------------------------
MOST_POOL_ROWS = 4096  # steps of more rows take in proportion longer: nothing is gained
POOL_LIMIT_FRACTION = 0.9  # of the limit: graphs of several sizes and the allocator need the rest
POOL_ROWS_FRACTION = 0.25  # of what is free beside the weights, at most for logits of all rows
POOL_AFTER_FAILURE = 0.75  # of that beside the weights after each out-of-memory error at a size that was to fit …
MOST_POOL_FAILURES = 4  # … and after so many, batches take over
POOL_READING_FRACTION = 0.5  # of what is free beside the weights, at most for reading a chunk if slots are short …
MOST_CHUNK_HALVINGS = 6  # … or it is halved, so often
POOL_REFILL_FRACTION = 0.875  # prompts are read when at most this part of the rows is taken: reading a few is slow
