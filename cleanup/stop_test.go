package cleanup_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox/cleanup"
)

// stops are the ways to stop a Run.
var stops = map[string]func(cleaner *cleanup.Cleaner, cancel func()) error{
	"context": func(_ *cleanup.Cleaner, cancel func()) error {
		cancel()
		return nil
	},
	"close": func(cleaner *cleanup.Cleaner, _ func()) error { return cleaner.Close() },
}

func TestStop(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script  func(ctx context.Context, call call) (int, error)
		within  time.Duration
		batches int
		deleted int
	}{
		"in the interval": {rows(0), 0, 1, 0},
		"in a pause": {func(_ context.Context, call call) (int, error) {
			if call.number == 2 {
				return 0, errors.New("the pause did not end")
			}
			time.Sleep(50 * time.Second) // before the stop, after which there is a pause of minutes
			return call.limit, nil
		}, 0, 1, 500},
		"in a batch that ends soon": {func(ctx context.Context, call call) (int, error) {
			select {
			case <-ctx.Done():
				return 0, ctx.Err()
			case <-time.After(60*time.Second + 400*time.Millisecond):
				return call.limit, nil
			}
		}, 400 * time.Millisecond, 1, 500},
		"in a batch that hangs": {func(ctx context.Context, _ call) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}, 500 * time.Millisecond, 1, 0},
	} {
		for way, stop := range stops {
			t.Run(name+" by "+way, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					store, observer, logger := &scriptedStore{script: test.script}, &observer{}, watermill.NewCaptureLogger()
					cleaner := newCleaner(t, cleanup.Config{
						Store: store, Interval: time.Hour, BatchTimeout: time.Hour, Observer: observer, Logger: logger,
					})
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					done := make(chan error, 1)
					go func() { done <- cleaner.Run(ctx) }()
					time.Sleep(time.Minute)
					synctest.Wait()
					began := time.Now()
					if err := stop(cleaner, cancel); err != nil {
						t.Error(err)
					}
					if err := <-done; err != nil {
						t.Errorf("Run returned %v", err)
					}
					wantBetween(t, "the time to stop", time.Since(began), test.within, test.within)
					events := observer.observed()
					if len(events) != 1 || events[0].Batches != test.batches || events[0].Deleted != test.deleted {
						t.Errorf("observed %+v", events)
					}
					if n := logged(logger, watermill.ErrorLogLevel); n != 0 {
						t.Errorf("logged %v", logger.Captured())
					}
				})
			})
		}
	}
}

func TestRunOnceThatIsStoppedSaysSo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{script: func(ctx context.Context, _ call) (int, error) {
			<-ctx.Done()
			return 0, errors.New("conn closed")
		}}
		cleaner := newCleaner(t, cleanup.Config{Store: store})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := cleaner.RunOnce(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("RunOnce returned %v", err)
		}
		if n := len(store.called()); n != 1 {
			t.Errorf("%d batches: the end of the caller's context is no timeout of a batch", n)
		}
		if err := cleaner.RunOnce(ctx); !errors.Is(err, context.DeadlineExceeded) || len(store.called()) != 1 {
			t.Errorf("RunOnce returned %v after %d batches", err, len(store.called()))
		}
	})
}

func TestRunsDoNotOverlap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{script: func(context.Context, call) (int, error) {
			time.Sleep(time.Second)
			return 0, nil
		}}
		cleaner := newCleaner(t, cleanup.Config{Store: store, Interval: time.Second})
		first, second := start(t, cleaner), start(t, cleaner)
		go cleanup.RunBeside(cleaner, t.Context(), func() bool { return false })
		for range 20 {
			if err := cleaner.RunOnce(t.Context()); err != nil {
				t.Error(err)
			}
		}
		first()
		second()
		if err := cleaner.Close(); err != nil {
			t.Error(err)
		}
		if store.peak != 1 || len(store.called()) < 40 {
			t.Errorf("%d calls, up to %d at the same time", len(store.called()), store.peak)
		}
	})
}

func TestWaitForTheTurnEndsWithTheContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{script: func(context.Context, call) (int, error) {
			time.Sleep(4 * time.Second)
			return 0, nil
		}}
		cleaner := newCleaner(t, cleanup.Config{Store: store})
		stop := start(t, cleaner)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := cleaner.RunOnce(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("RunOnce returned %v", err)
		}
		stop()
		if n := len(store.called()); n != 1 {
			t.Errorf("%d calls", n)
		}
	})
}

func TestClosedCleanerStartsNothing(t *testing.T) {
	t.Parallel()
	store := &scriptedStore{script: rows(1)}
	cleaner := newCleaner(t, cleanup.Config{Store: store})
	for range 2 {
		if err := cleaner.Close(); err != nil {
			t.Error(err)
		}
	}
	if cleaner.Run(t.Context()) == nil || cleaner.RunOnce(t.Context()) == nil || cleaner.Plugin(t.Context())(nil) == nil {
		t.Error("no error after Close")
	}
	if n := len(store.called()); n != 0 {
		t.Errorf("%d calls", n)
	}
}
