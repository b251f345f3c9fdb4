package cleanup

import "time"

// Observer is told of every run once it ended, by the goroutine that ran it, and before the next one starts.
type Observer interface {
	ObserveCleanup(RunEvent)
}

// RunEvent describes one run.
type RunEvent struct {
	// Deleted is how many records were deleted, in how many Batches. Batches that failed count as well.
	Deleted, Batches int

	// Duration is how long the run took.
	Duration time.Duration

	// Err is what ended the run before its time. It wraps [context.Canceled] or [context.DeadlineExceeded] if the run was
	// stopped. What was deleted until then stays deleted.
	Err error

	// Capped says that the run ended at [Config].MaxRows: there may be more to delete.
	Capped bool

	// OldestAge is the age of the oldest record left that is not kept for its outputs. Far beyond the retention, it says
	// that the cleanup does not keep up. It is 0 if there is no record, if the store is no [AgeReporter], or after an
	// error.
	OldestAge time.Duration

	// Stranded is how many records beyond the retention are kept because they have outputs that were not published. It is
	// 0 if the store is no [StrandedCounter], or after an error.
	Stranded int64
}
