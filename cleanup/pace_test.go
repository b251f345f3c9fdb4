package cleanup_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox/cleanup"
)

func TestBatchesAdapt(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(ctx context.Context) error{
		"timeout": func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		},
		"lock conflict": func(context.Context) error { return errTransient },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				store, observer, logger := &scriptedStore{}, &observer{}, watermill.NewCaptureLogger()
				store.script = func(ctx context.Context, call call) (int, error) {
					if call.limit > 300 && call.number < 10 {
						return 0, fail(ctx)
					}
					if call.number == 30 {
						return 0, nil
					}
					return call.limit, nil
				}
				cleaner := newCleaner(t, cleanup.Config{
					Store: classifyingStore{store}, BatchSize: 1000, Observer: observer, Logger: logger,
				})
				if err := cleaner.RunOnce(t.Context()); err != nil {
					t.Fatal(err)
				}
				want := []int{1000, 500, 250, 312, 156, 218, 280, 342, 171, 233, 295, 357}
				if limits := store.limits(); !slices.Equal(limits[:len(want)], want) || limits[29] != 1000 {
					t.Errorf("asked for %v, want %v … 1000", limits, want)
				}
				if n := logged(logger, watermill.ErrorLogLevel); n != 0 {
					t.Errorf("%d lines at Error", n)
				}
			})
		})
	}
}

func TestBatchesNeverBecomeEmpty(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 9, 1000} {
		synctest.Test(t, func(t *testing.T) {
			store := &scriptedStore{script: func(context.Context, call) (int, error) { return 0, errTransient }}
			cleaner := newCleaner(t, cleanup.Config{Store: classifyingStore{store}, BatchSize: size})
			for range 3 {
				if err := cleaner.RunOnce(t.Context()); !errors.Is(err, errTransient) {
					t.Errorf("RunOnce returned %v", err)
				}
			}
			if smallest, want := slices.Min(store.limits()), min(size, 10); smallest != want {
				t.Errorf("of at most %d, the smallest batch was %d, want %d", size, smallest, want)
			}
		})
	}
}

func TestGivesUpAfterFailuresInARow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, observer := &scriptedStore{}, &observer{}
		store.script = func(_ context.Context, call call) (int, error) {
			if call.number == 4 {
				return call.limit, nil
			}
			return 0, errTransient
		}
		cleaner := newCleaner(t, cleanup.Config{Store: classifyingStore{store}, BatchSize: 100, Observer: observer})
		if err := cleaner.RunOnce(t.Context()); !errors.Is(err, errTransient) {
			t.Errorf("RunOnce returned %v", err)
		}
		calls := store.called()
		if event := observer.observed()[0]; len(calls) != 9 || event.Batches != 9 || event.Deleted != calls[3].limit {
			t.Errorf("%d calls, observed %+v", len(calls), event)
		}
		for i, base := range map[int]time.Duration{
			0: 100 * time.Millisecond, 1: 200 * time.Millisecond, 2: 400 * time.Millisecond,
			4: 100 * time.Millisecond, 5: 200 * time.Millisecond, 6: 400 * time.Millisecond, 7: 800 * time.Millisecond,
		} {
			wantBetween(t, "the pause", calls[i+1].began.Sub(calls[i].ended), base/2, base)
		}
	})
}

func TestOtherErrorsEndTheRunAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failure := errors.New("no such table")
		store, observer := &scriptedStore{}, &observer{}
		store.script = func(_ context.Context, call call) (int, error) {
			if call.number == 2 {
				return 0, failure
			}
			return call.limit, nil
		}
		cleaner := newCleaner(t, cleanup.Config{Store: store, BatchSize: 100, Observer: observer})
		if err := cleaner.RunOnce(t.Context()); err != failure { //nolint:errorlint // the store's error, untouched
			t.Errorf("RunOnce returned %v", err)
		}
		if event := observer.observed()[0]; event.Deleted != 100 || event.Batches != 2 || !errors.Is(event.Err, failure) {
			t.Errorf("observed %+v", event)
		}
	})
}

func TestPauseGrowsWithTheBatches(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ batch, min, max time.Duration }{
		{0, 5 * time.Millisecond, 10 * time.Millisecond},
		{400 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond},
		{10 * time.Millisecond, 120 * time.Millisecond, 240 * time.Millisecond},
		{time.Second, 12 * time.Second, 24 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			store := &scriptedStore{script: func(_ context.Context, call call) (int, error) {
				time.Sleep(test.batch)
				return call.limit, nil
			}}
			cleaner := newCleaner(t, cleanup.Config{Store: store, BatchSize: 10, MaxRows: 100})
			if err := cleaner.RunOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
			calls := store.called()
			different := false
			for i, call := range calls[1:] {
				pause := call.began.Sub(calls[i].ended)
				wantBetween(t, "the pause", pause, test.min, test.max)
				different = different || pause != calls[1].began.Sub(calls[0].ended)
			}
			if !different {
				t.Error("all pauses are the same")
			}
		})
	}
}

func TestPausesShrinkWhenThereIsAlwaysMore(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ retention, step time.Duration }{
		{cleanup.Forever - 1, 5 * time.Minute},
		{time.Minute, time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			const batch = 10 * time.Millisecond
			began := time.Now()
			nothing := false
			store := &scriptedStore{script: func(_ context.Context, call call) (int, error) {
				time.Sleep(batch)
				if !nothing && time.Since(began) > 6*test.step {
					nothing = true
					return 0, nil
				}
				return call.limit, nil
			}}
			stop := start(t, newCleaner(t, cleanup.Config{
				Store: store, BatchSize: 10, Retention: test.retention, MaxRows: 5000, Interval: time.Second,
			}))
			time.Sleep(6*test.step + 30*time.Second)
			stop()
			calls := store.called()
			longest := make(map[time.Duration]time.Duration) // by step
			for i, call := range calls[1:] {
				if pause := call.began.Sub(calls[i].ended); pause < 700*time.Millisecond { // the others are between runs
					step := calls[i].began.Sub(began) / test.step
					longest[step] = max(longest[step], pause)
				}
			}
			for step, factor := range map[time.Duration]time.Duration{0: 24, 1: 12, 2: 6, 3: 3, 4: 1, 5: 1, 6: 24} {
				wantBetween(t, "the longest pause", longest[step], factor*batch*8/10, factor*batch)
			}
		})
	}
}
