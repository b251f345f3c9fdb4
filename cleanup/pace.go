package cleanup

import (
	"math/rand/v2"
	"time"
)

const (
	// minBatchSize is what batches do not shrink below.
	minBatchSize = 10

	// pauseFactor is how many times longer than the batch before it a pause is, before it is shortened at random: a
	// cleaner keeps the database busy for a twentieth of the time, and as little as that also when batches take long.
	pauseFactor = 24

	// maxHurryAfter is how long there may always be more to delete until pauses are halved, and then halved again. A
	// backlog is no reason for haste, but an inbox that grows faster than it is cleaned up would grow without end.
	maxHurryAfter = 5 * time.Minute

	// minRetryPause is the pause after a batch failed. It doubles with each failure in a row.
	minRetryPause = 100 * time.Millisecond
)

// pace decides how large batches are, and how long the pauses between them.
type pace struct {
	maxSize    int
	minPause   time.Duration
	hurryAfter time.Duration

	size     int
	failures int       // in a row
	behind   time.Time // since when there always was more; zero if there is not
}

func newPace(config Config) *pace {
	return &pace{
		maxSize:  config.BatchSize,
		minPause: config.BatchPause,
		// With a short retention, so that the inbox does not become many times as large as it should be.
		hurryAfter: min(config.Retention, maxHurryAfter),
		size:       config.BatchSize,
	}
}

// succeeded notes that a batch took so long, and whether there is more. It returns the pause after it.
func (p *pace) succeeded(took time.Duration, more bool) time.Duration {
	p.failures = 0
	p.size = min(p.size+max(p.maxSize/16, 1), p.maxSize)
	now := time.Now()
	switch {
	case !more:
		p.behind = time.Time{}
	case p.behind.IsZero():
		p.behind = now
	}
	factor := max(pauseFactor>>min(now.Sub(p.behind)/p.hurryAfter, pauseFactor), 1)
	return max(p.minPause, time.Duration(factor)*took)
}

// failed notes that a batch failed after so long, and returns the pause before the next one.
func (p *pace) failed(took time.Duration) time.Duration {
	pause := max(p.minPause, minRetryPause<<p.failures, pauseFactor*took)
	p.failures++
	p.size = max(p.size/2, min(minBatchSize, p.maxSize))
	return pause
}

// shorten returns a duration that is shorter than d by a random share of up to one part. It never overflows.
func shorten(d time.Duration, part int64) time.Duration {
	return d - rand.N(d/time.Duration(part)+1) //nolint:gosec // no secret
}
