package cleanup

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

const (
	// maxFailures is how many batches in a row may fail before the run does.
	maxFailures = 5

	// stopGrace is how long a batch may go on after its run was stopped. Most end by themselves in that time, which
	// spares the database a cancelled statement, and the pool a connection.
	stopGrace = 500 * time.Millisecond
)

// run waits for its turn, deletes what is expired, and tells of it.
func (c *Cleaner) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return stopped(ctx)
	case c.turn <- struct{}{}:
	}
	defer func() { <-c.turn }()

	began := time.Now()
	var event RunEvent
	event.Err = c.deleteExpired(ctx, &event)
	if event.Err == nil {
		event.Err = c.measure(ctx, &event)
	}
	event.Duration = time.Since(began)
	if event.Deleted > 0 {
		c.config.Logger.Info("Deleted expired inbox records", watermill.LogFields{
			"deleted":    event.Deleted,
			"batches":    event.Batches,
			"duration":   event.Duration,
			"oldest_age": event.OldestAge,
			"stranded":   event.Stranded,
		})
	}
	c.observe(event)
	return event.Err
}

func (c *Cleaner) deleteExpired(ctx context.Context, event *RunEvent) error {
	c.pace.failures = 0
	for event.Deleted < c.config.MaxRows {
		if ctx.Err() != nil {
			return stopped(ctx)
		}
		limit := min(c.pace.size, c.config.MaxRows-event.Deleted)
		var deleted int
		began := time.Now()
		err := c.bounded(ctx, func(ctx context.Context) (err error) {
			deleted, err = c.config.Store.DeleteExpired(ctx, c.config.age(), limit)
			return err
		})
		took := time.Since(began)
		event.Batches++
		event.Deleted += deleted
		var pause time.Duration
		switch {
		case err == nil && deleted < limit:
			c.pace.succeeded(took, false)
			return nil
		case err == nil:
			pause = c.pace.succeeded(took, true)
		case ctx.Err() != nil:
			return errors.Join(stopped(ctx), err)
		default:
			pause = c.pace.failed(took)
			if !c.isPassing(err) || c.pace.failures == maxFailures {
				return err
			}
			c.config.Logger.Debug("Deleting a batch of expired inbox records failed; trying a smaller one",
				watermill.LogFields{"err": err, "batch_size": c.pace.size, "pause": pause})
		}
		if event.Deleted < c.config.MaxRows {
			sleep(ctx, shorten(pause, 2))
		}
	}
	event.Capped = true
	return nil
}

// isPassing reports whether a smaller batch, a little later, may succeed.
func (c *Cleaner) isPassing(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || c.classifier != nil && c.classifier.IsTransient(err)
}

// measure asks for what is left.
func (c *Cleaner) measure(ctx context.Context, event *RunEvent) error {
	if reporter, ok := c.config.Store.(AgeReporter); ok {
		err := c.bounded(ctx, func(ctx context.Context) (err error) {
			event.OldestAge, _, err = reporter.OldestAge(ctx)
			return err
		})
		if err != nil {
			return err
		}
	}
	if counter, ok := c.config.Store.(StrandedCounter); ok {
		return c.bounded(ctx, func(ctx context.Context) (err error) {
			event.Stranded, err = counter.CountStranded(ctx, c.config.Retention)
			return err
		})
	}
	return nil
}

// bounded calls the store, for as long as BatchTimeout allows, and no longer than stopGrace after ctx ended. A panic
// becomes an error.
func (c *Cleaner) bounded(ctx context.Context, call func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return stopped(ctx)
	}
	callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.BatchTimeout)
	defer cancel()
	detach := context.AfterFunc(ctx, func() {
		sleep(callCtx, stopGrace)
		cancel()
	})
	defer detach()
	defer func() {
		if value := recover(); value != nil {
			err = asError(value)
		}
	}()
	return call(callCtx)
}

func (c *Cleaner) observe(event RunEvent) {
	if c.config.Observer == nil {
		return
	}
	defer func() {
		if value := recover(); value != nil {
			c.config.Logger.Error("The observer of the inbox cleanup panicked", asError(value), nil)
		}
	}()
	c.config.Observer.ObserveCleanup(event)
}

// asError returns the error for a panic. The value stays in its chain if it is one.
func asError(value any) error {
	if err, ok := value.(error); ok {
		return fmt.Errorf("inbox: clean up: panic: %w\n%s", err, debug.Stack())
	}
	return fmt.Errorf("inbox: clean up: panic: %v\n%s", value, debug.Stack())
}
