// Package cleanup deletes inbox records that are older than the retention.
//
// A [Cleaner] runs as a plugin of a Watermill router, by itself ([Cleaner.Run]), or once ([Cleaner.RunOnce]), for a cron
// job. Any number of them may work on one table, in any number of processes: none leads, and none waits for another or
// keeps a claim waiting. A run deletes in small batches, each a transaction of its own with a pause after it, and holds
// one connection of the pool at most.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox"
)

// Cleaner deletes expired records. It is safe for concurrent use; its runs never overlap.
type Cleaner struct {
	config     Config
	classifier inbox.TransientClassifier // nil if the store has none
	turn       chan struct{}             // held by the run
	pace       *pace                     // of the run

	mu      sync.Mutex
	closed  bool
	stops   map[*context.CancelFunc]struct{}
	entered sync.WaitGroup
}

// New returns a Cleaner, or the faults of the configuration. It starts nothing.
func New(config Config) (*Cleaner, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()
	c := &Cleaner{
		config: config,
		turn:   make(chan struct{}, 1),
		pace:   newPace(config),
		stops:  make(map[*context.CancelFunc]struct{}),
	}
	c.classifier, _ = config.Store.(inbox.TransientClassifier)
	return c, nil
}

var errClosed = errors.New("inbox: clean up: the cleaner is closed")

// Run cleans up at once, and then each time the interval passed, until ctx ends or the cleaner is closed; it returns nil
// then, within a second. A batch that is under way gets half of it to finish. A run that fails or panics is logged, and
// the next one comes after the interval.
func (c *Cleaner) Run(ctx context.Context) error {
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if c.config.Retention == Forever {
		<-ctx.Done()
		return nil
	}
	for ctx.Err() == nil {
		if err := c.run(ctx); err != nil && ctx.Err() == nil {
			c.config.Logger.Error("Deleting expired inbox records failed; trying again after the interval", err,
				watermill.LogFields{"interval": c.config.Interval})
		}
		sleep(ctx, shorten(c.config.Interval, 5))
	}
	return nil
}

// RunOnce cleans up once: until nothing is expired, or [Config].MaxRows are deleted. If another run of this cleaner is
// under way, it waits for that first. When ctx ends or the cleaner is closed, it returns like [Cleaner.Run], but with an
// error. What was deleted before an error stays deleted.
func (c *Cleaner) RunOnce(ctx context.Context) error {
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if c.config.Retention == Forever {
		return nil
	}
	return c.run(ctx)
}

// Close stops all runs and waits for them, at most about a second. Afterwards none can be started. It returns nil.
func (c *Cleaner) Close() error {
	c.mu.Lock()
	c.closed = true
	for stop := range c.stops {
		(*stop)()
	}
	c.mu.Unlock()
	c.entered.Wait()
	return nil
}

func (c *Cleaner) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// enter returns a context that also ends when the cleaner is closed; Close waits until leave was called.
func (c *Cleaner) enter(ctx context.Context) (_ context.Context, leave func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, errClosed
	}
	ctx, cancel := context.WithCancel(ctx)
	c.stops[&cancel] = struct{}{}
	c.entered.Add(1)
	return ctx, func() {
		cancel()
		c.mu.Lock()
		delete(c.stops, &cancel)
		c.mu.Unlock()
		c.entered.Done()
	}, nil
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// stopped returns the error of a run that ctx ended.
func stopped(ctx context.Context) error { return fmt.Errorf("inbox: clean up: %w", ctx.Err()) }
