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
		{500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond},
		{10 * time.Millisecond, 60 * time.Millisecond, 120 * time.Millisecond},
		{time.Second, 6 * time.Second, 12 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			store := &scriptedStore{script: func(_ context.Context, call call) (int, error) {
				time.Sleep(test.batch)
				return call.limit, nil
			}}
			cleaner := newCleaner(t, cleanup.Config{Store: store, BatchSize: 10, MaxRows: 200})
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
	synctest.Test(t, func(t *testing.T) {
		const batch = 10 * time.Millisecond
		store := &scriptedStore{}
		began := time.Now()
		store.script = func(_ context.Context, call call) (int, error) {
			time.Sleep(batch)
			if since := time.Since(began); since > 40*time.Minute && since < 41*time.Minute {
				return 0, nil
			}
			return call.limit, nil
		}
		stop := start(t, newCleaner(t, cleanup.Config{Store: store, BatchSize: 10, MaxRows: 10_000, Interval: time.Second}))
		time.Sleep(43 * time.Minute)
		stop()
		calls := store.called()
		longest := make(map[int]time.Duration) // by five minutes
		for i, call := range calls[1:] {
			pause := call.began.Sub(calls[i].ended)
			if pause > 12*batch { // between two runs
				continue
			}
			minutes := int(calls[i].began.Sub(began).Minutes())
			if minutes != 40 { // nothing left
				longest[minutes/5] = max(longest[minutes/5], pause)
			}
		}
		for span, factor := range map[int]time.Duration{0: 12, 1: 6, 2: 3, 3: 1, 4: 1, 7: 1, 8: 12} {
			wantBetween(t, "the longest pause", longest[span], factor*batch*9/10, factor*batch)
		}
	})
}
