package cleanup_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox/cleanup"
)

const week = 7 * 24 * time.Hour

func TestConfigFaults(t *testing.T) {
	t.Parallel()
	store := &scriptedStore{script: rows(0)}
	var nilStore *scriptedStore
	for name, test := range map[string]struct {
		config cleanup.Config
		want   []string
	}{
		"no store":           {cleanup.Config{}, []string{"Config.Store"}},
		"nil store":          {cleanup.Config{Store: nilStore}, []string{"Config.Store"}},
		"negative retention": {cleanup.Config{Store: store, Retention: -1}, []string{"Config.Retention"}},
		"every field": {
			cleanup.Config{
				Retention: -1, RedeliveryHorizon: -1, Interval: -1, BatchSize: -1, BatchTimeout: -1, BatchPause: -1, MaxRows: -1,
			},
			[]string{
				"Config.Store", "Config.Retention", "Config.RedeliveryHorizon", "Config.Interval", "Config.BatchSize",
				"Config.BatchTimeout", "Config.BatchPause", "Config.MaxRows",
			},
		},
		"retention below the horizon": {
			cleanup.Config{Store: store, Retention: time.Hour, RedeliveryHorizon: 2 * time.Hour},
			[]string{"Retention >= RedeliveryHorizon", "1h0m0s < 2h0m0s"},
		},
		"default below the horizon": {
			cleanup.Config{Store: store, RedeliveryHorizon: week + 1},
			[]string{"Retention >= RedeliveryHorizon", "168h0m0s < 168h0m0.000000001s"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cleaner, err := cleanup.New(test.config)
			if err == nil || cleaner != nil {
				t.Fatalf("New returned %v, %v", cleaner, err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

func TestRetentionThatCoversTheHorizonIsAccepted(t *testing.T) {
	t.Parallel()
	store := &scriptedStore{script: rows(0)}
	newCleaner(t, cleanup.Config{Store: store, RedeliveryHorizon: week})
	newCleaner(t, cleanup.Config{Store: store, Retention: cleanup.Forever, RedeliveryHorizon: math.MaxInt64})
}

func TestAge(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ retention, min, max time.Duration }{
		"default":      {0, week + 10*time.Second, week + time.Minute},
		"one second":   {time.Second, time.Second, 1010 * time.Millisecond},
		"no overflow":  {cleanup.Forever - 1, cleanup.Forever - 1, cleanup.Forever},
		"a nanosecond": {1, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &scriptedStore{script: rows(0)}
			if err := newCleaner(t, cleanup.Config{Store: store, Retention: test.retention}).RunOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantBetween(t, "the age", store.called()[0].age, test.min, test.max)
		})
	}
}

func TestRunOnceDeletesInBatchesUntilNothingIsExpired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, observer, logger := &scriptedStore{script: rows(250)}, &observer{}, watermill.NewCaptureLogger()
		cleaner := newCleaner(t, cleanup.Config{Store: store, BatchSize: 100, Observer: observer, Logger: logger})
		began := time.Now()
		if err := cleaner.RunOnce(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := cleanup.RunEvent{Deleted: 250, Batches: 3, Duration: time.Since(began)}
		if events := observer.observed(); len(events) != 1 || events[0] != want {
			t.Errorf("observed %+v, want %+v", events, want)
		}
		if n := logged(logger, watermill.InfoLogLevel); n != 1 {
			t.Errorf("%d lines at Info", n)
		}
	})
}

func TestRunIsQuietWhenNothingIsExpired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, observer, logger := &scriptedStore{script: rows(0)}, &observer{}, watermill.NewCaptureLogger()
		stop := start(t, newCleaner(t, cleanup.Config{Store: store, Observer: observer, Logger: logger}))
		time.Sleep(time.Hour)
		stop()
		if n := len(observer.observed()); n < 60 || n > 75 {
			t.Errorf("%d runs in an hour", n)
		}
		if captured := logger.Captured(); len(captured) != 0 {
			t.Errorf("logged %v", captured)
		}
	})
}

func TestRunEndsAtMaxRows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, observer := &scriptedStore{script: rows(1000)}, &observer{}
		cleaner := newCleaner(t, cleanup.Config{Store: store, BatchSize: 100, MaxRows: 250, Observer: observer})
		for range 4 {
			if err := cleaner.RunOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if want := []int{100, 100, 50}; !slices.Equal(store.limits()[:3], want) {
			t.Errorf("asked for %v, want %v", store.limits()[:3], want)
		}
		for _, event := range observer.observed() {
			if event.Deleted != 250 || !event.Capped {
				t.Errorf("observed %+v", event)
			}
		}
	})
}

func TestForeverNeverDeletes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, observer := &scriptedStore{script: rows(1)}, &observer{}
		cleaner := newCleaner(t, cleanup.Config{Store: store, Retention: cleanup.Forever, Observer: observer})
		if err := cleaner.RunOnce(t.Context()); err != nil {
			t.Error(err)
		}
		stop := start(t, cleaner)
		time.Sleep(24 * time.Hour)
		wantBetween(t, "the time to stop", stop(), 0, 0)
		if calls, events := store.called(), observer.observed(); len(calls)+len(events) != 0 {
			t.Errorf("store called: %v, observed: %v", calls, events)
		}
	})
}

func TestIntervalIsJitteredWithinBounds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{script: func(context.Context, call) (int, error) {
			time.Sleep(time.Second)
			return 0, nil
		}}
		began := time.Now()
		stop := start(t, newCleaner(t, cleanup.Config{Store: store, Interval: time.Hour}))
		time.Sleep(100 * time.Hour)
		stop()
		calls := store.called()
		if !calls[0].began.Equal(began) {
			t.Errorf("the first run began after %s", calls[0].began.Sub(began))
		}
		different := false
		for i, call := range calls[1:] {
			pause := call.began.Sub(calls[i].ended)
			wantBetween(t, "the pause", pause, 48*time.Minute, time.Hour)
			different = different || pause != calls[1].began.Sub(calls[0].ended)
		}
		if !different {
			t.Error("all pauses are the same")
		}
	})
}

func TestHugeDurationsDoNotOverflow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &scriptedStore{script: rows(1)}
		stop := start(t, newCleaner(t, cleanup.Config{
			Store: store, BatchSize: 1, Retention: cleanup.Forever - 1,
			Interval: math.MaxInt64, BatchTimeout: math.MaxInt64, BatchPause: math.MaxInt64,
		}))
		time.Sleep(10 * 365 * 24 * time.Hour)
		if n := len(store.called()); n != 1 {
			t.Errorf("%d batches", n)
		}
		wantBetween(t, "the time to stop", stop(), 0, 0)
	})
}

func TestGoesOnAfterTheDatabaseWasDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		down := errors.New("connection refused")
		began := time.Now()
		store, observer, logger := &scriptedStore{}, &observer{}, watermill.NewCaptureLogger()
		store.script = func(context.Context, call) (int, error) {
			if time.Since(began) < 10*time.Minute {
				return 0, down
			}
			return 1, nil
		}
		stop := start(t, newCleaner(t, cleanup.Config{
			Store: store, Interval: time.Minute, Observer: observer, Logger: logger,
		}))
		time.Sleep(10*time.Minute - 1)
		failed := len(observer.observed())
		time.Sleep(5 * time.Minute)
		stop()
		if failed < 10 || failed > 13 || logged(logger, watermill.ErrorLogLevel) != failed || !logger.HasError(down) {
			t.Errorf("%d runs failed in 10 minutes, logged %v", failed, logger.Captured())
		}
		if runs := len(observer.observed()); runs < failed+5 || logged(logger, watermill.InfoLogLevel) != runs-failed {
			t.Errorf("%d runs after the database came back, logged %v", runs-failed, logger.Captured())
		}
	})
}

func TestPanicOfTheStoreIsAnError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failure := errors.New("failure")
		store, observer, logger := &scriptedStore{}, &observer{}, watermill.NewCaptureLogger()
		store.script = func(_ context.Context, call call) (int, error) {
			switch call.number {
			case 1:
				panic(failure)
			case 2:
				panic("text")
			}
			return 1, nil
		}
		stop := start(t, newCleaner(t, cleanup.Config{Store: store, Observer: observer, Logger: logger}))
		time.Sleep(150 * time.Second)
		stop()
		events := observer.observed()
		if !errors.Is(events[0].Err, failure) || !strings.Contains(events[0].Err.Error(), "scripted_test.go") {
			t.Errorf("observed %v, want the panic's value and its stack", events[0].Err)
		}
		if !strings.Contains(events[1].Err.Error(), "panic: text") {
			t.Errorf("observed %v", events[1].Err)
		}
		if events[2].Err != nil || events[2].Deleted != 1 {
			t.Errorf("observed %+v", events[2])
		}
		if n := logged(logger, watermill.ErrorLogLevel); n != 2 {
			t.Errorf("%d lines at Error", n)
		}
	})
}

type panickingObserver struct{ observer }

func (o *panickingObserver) ObserveCleanup(event cleanup.RunEvent) {
	o.observer.ObserveCleanup(event)
	panic("observer")
}

func TestPanicOfTheObserverIsLogged(t *testing.T) {
	t.Parallel()
	store, observer, logger := &scriptedStore{script: rows(1)}, &panickingObserver{}, watermill.NewCaptureLogger()
	cleaner := newCleaner(t, cleanup.Config{Store: store, Observer: observer, Logger: logger})
	for range 2 {
		if err := cleaner.RunOnce(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if len(observer.observed()) != 2 || logged(logger, watermill.ErrorLogLevel) != 2 {
		t.Errorf("%d events, logged %v", len(observer.observed()), logger.Captured())
	}
}

// measuringStore knows what is left.
type measuringStore struct {
	*scriptedStore
	oldest, stranded error
	olderThan        time.Duration
}

func (s *measuringStore) OldestAge(context.Context) (time.Duration, bool, error) {
	return 5 * time.Hour, true, s.oldest
}

func (s *measuringStore) CountStranded(_ context.Context, olderThan time.Duration) (int64, error) {
	s.olderThan = olderThan
	return 7, s.stranded
}

func TestEventSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	store, observer := &measuringStore{scriptedStore: &scriptedStore{script: rows(1)}}, &observer{}
	cleaner := newCleaner(t, cleanup.Config{Store: store, Retention: 4 * time.Hour, Observer: observer})
	if err := cleaner.RunOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	event := observer.observed()[0]
	if event.OldestAge != 5*time.Hour || event.Stranded != 7 || store.olderThan != 4*time.Hour {
		t.Errorf("observed %+v, asked for stranded outputs older than %s", event, store.olderThan)
	}
}

func TestErrorInMeasuringIsTheRuns(t *testing.T) {
	t.Parallel()
	failure := errors.New("failure")
	for name, store := range map[string]*measuringStore{
		"oldest":   {oldest: failure},
		"stranded": {stranded: failure},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store.scriptedStore = &scriptedStore{script: rows(1)}
			observer := &observer{}
			cleaner := newCleaner(t, cleanup.Config{Store: store, Observer: observer})
			if err := cleaner.RunOnce(t.Context()); !errors.Is(err, failure) {
				t.Errorf("RunOnce returned %v", err)
			}
			if event := observer.observed()[0]; event.Deleted != 1 || !errors.Is(event.Err, failure) {
				t.Errorf("observed %+v", event)
			}
		})
	}
}
