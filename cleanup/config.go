package cleanup

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// Forever as [Config].Retention keeps every record: the cleaner never deletes anything.
const Forever time.Duration = math.MaxInt64

// Store deletes expired records. The stores of packages sqlstore and pgxstore implement it, and package storetest checks
// an implementation.
type Store interface {
	// DeleteExpired deletes records whose transaction ended longer ago than age, by the clock that wrote them: at most
	// limit of them, the oldest first, in one short transaction. It never deletes outputs that were not published, passes
	// over what others have locked, and returns how many it deleted. If that is less than limit, then nothing more is to
	// be had now.
	DeleteExpired(ctx context.Context, age time.Duration, limit int) (deleted int, err error)
}

// AgeReporter is implemented by stores that know how old their oldest record is, for [RunEvent].OldestAge.
type AgeReporter interface {
	// OldestAge returns the age of the oldest record that is not kept for its outputs, and false if there is none.
	OldestAge(ctx context.Context) (age time.Duration, ok bool, err error)
}

// StrandedCounter is implemented by stores that can count the records that only their outputs keep from being deleted, for
// [RunEvent].Stranded.
type StrandedCounter interface {
	// CountStranded returns how many records older than olderThan have outputs that were not published.
	CountStranded(ctx context.Context, olderThan time.Duration) (int64, error)
}

// Config configures a [Cleaner]. Only Store is required.
type Config struct {
	// Store is whose records are deleted. Required.
	Store Store

	// Retention is how long records are kept after their message was processed, by the database's clock. It is the
	// deduplication window: a message that is delivered again later is processed again. Records are deleted up to 1 %
	// later than that, at most a minute, which allows for the time that a COMMIT takes. [Forever] keeps all of them.
	// Defaults to 7 days.
	Retention time.Duration

	// RedeliveryHorizon is how long after it was processed a message may be delivered again: by the broker, a
	// delayed retry, a dead-letter queue, an offset that is set back. If it is given, [New] refuses a Retention that is
	// shorter. Defaults to unknown.
	RedeliveryHorizon time.Duration

	// Interval is the pause after a run, shortened by up to a fifth at random, so that replicas do not run in step.
	// Defaults to 1 minute.
	Interval time.Duration

	// BatchSize is how many records are deleted at most in one transaction. After a timeout or a lock conflict batches
	// become smaller, and then slowly larger again, up to this. On SQLite all other writers wait for a batch. Defaults to
	// 500.
	BatchSize int

	// BatchTimeout bounds each batch, and each query for [RunEvent]. Defaults to 5 seconds.
	BatchTimeout time.Duration

	// BatchPause is the shortest pause between two batches. A pause is also 15 times as long as the batch before it took,
	// so that the cleaner slows down when the database does. That factor is halved for each five minutes (or each
	// Retention, if that is shorter) in which there always was more to delete, so that no inbox outgrows its cleaner.
	// Pauses are shortened by up to a half at random. Defaults to 10 milliseconds.
	BatchPause time.Duration

	// MaxRows is how many records are deleted at most in one run. The rest is left to the next one. Defaults to 1,000,000.
	MaxRows int

	// Observer is told of every run. Defaults to nobody.
	Observer Observer

	// Logger gets one line for each run that deleted records, at level Info, and one for each that failed, at level
	// Error. Defaults to none.
	Logger watermill.LoggerAdapter
}

func (c *Config) setDefaults() {
	if c.Retention == 0 {
		c.Retention = 7 * 24 * time.Hour
	}
	if c.Interval == 0 {
		c.Interval = time.Minute
	}
	if c.BatchSize == 0 {
		c.BatchSize = 500
	}
	if c.BatchTimeout == 0 {
		c.BatchTimeout = 5 * time.Second
	}
	if c.BatchPause == 0 {
		c.BatchPause = 10 * time.Millisecond
	}
	if c.MaxRows == 0 {
		c.MaxRows = 1_000_000
	}
	if c.Logger == nil {
		c.Logger = watermill.NopLogger{}
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c Config) Validate() error {
	c.setDefaults()
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("inbox: Config."+format, args...))
	}
	if store := reflect.ValueOf(c.Store); c.Store == nil || store.Kind() == reflect.Pointer && store.IsNil() {
		fault("Store is required")
	}
	for _, field := range []struct {
		name  string
		value time.Duration
	}{
		{"Retention", c.Retention},
		{"RedeliveryHorizon", c.RedeliveryHorizon},
		{"Interval", c.Interval},
		{"BatchTimeout", c.BatchTimeout},
		{"BatchPause", c.BatchPause},
	} {
		if field.value < 0 {
			fault("%s is negative: %s", field.name, field.value)
		}
	}
	if c.BatchSize < 0 {
		fault("BatchSize is negative: %d", c.BatchSize)
	}
	if c.MaxRows < 0 {
		fault("MaxRows is negative: %d", c.MaxRows)
	}
	if c.Retention >= 0 && c.Retention < c.RedeliveryHorizon {
		fault("Retention is too short: Retention >= RedeliveryHorizon must hold, but %s < %s, and a message that is "+
			"delivered again after its record was deleted is processed again", c.Retention, c.RedeliveryHorizon)
	}
	return errors.Join(faults...)
}

// age returns the age at which records are deleted. It is counted from when their transaction was about to commit, so a
// little is added for the COMMIT, during which nobody sees the record: by default that may take 10 seconds.
func (c *Config) age() time.Duration {
	allowance := min(c.Retention/100, time.Minute)
	return c.Retention + min(allowance, Forever-c.Retention)
}
