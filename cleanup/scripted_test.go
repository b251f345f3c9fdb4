package cleanup_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox/cleanup"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// call is a call of DeleteExpired.
type call struct {
	number int // from 1
	began  time.Time
	ended  time.Time
	age    time.Duration
	limit  int
}

// scriptedStore answers as its script says, and notes what it was asked.
type scriptedStore struct {
	script func(ctx context.Context, call call) (int, error)

	mu    sync.Mutex
	calls []call
	open  int
	peak  int // of calls at the same time
}

func (s *scriptedStore) DeleteExpired(ctx context.Context, age time.Duration, limit int) (int, error) {
	s.mu.Lock()
	number := len(s.calls)
	s.calls = append(s.calls, call{number: number + 1, began: time.Now(), age: age, limit: limit})
	this := s.calls[number]
	s.open++
	s.peak = max(s.peak, s.open)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.open--
		s.calls[number].ended = time.Now()
		s.mu.Unlock()
	}()
	return s.script(ctx, this)
}

func (s *scriptedStore) called() []call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]call(nil), s.calls...)
}

func (s *scriptedStore) limits() []int {
	var limits []int
	for _, call := range s.called() {
		limits = append(limits, call.limit)
	}
	return limits
}

var errTransient = errors.New("deadlock")

// classifyingStore knows transient errors.
type classifyingStore struct{ *scriptedStore }

func (classifyingStore) IsTransient(err error) bool { return errors.Is(err, errTransient) }

// rows is the script of a store with so many expired records.
func rows(n int) func(context.Context, call) (int, error) {
	var mu sync.Mutex
	return func(_ context.Context, call call) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		deleted := min(n, call.limit)
		n -= deleted
		return deleted, nil
	}
}

// observer keeps the events.
type observer struct {
	mu     sync.Mutex
	events []cleanup.RunEvent
}

func (o *observer) ObserveCleanup(event cleanup.RunEvent) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.events = append(o.events, event)
}

func (o *observer) observed() []cleanup.RunEvent {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]cleanup.RunEvent(nil), o.events...)
}

func newCleaner(tb testing.TB, config cleanup.Config) *cleanup.Cleaner {
	tb.Helper()
	cleaner, err := cleanup.New(config)
	if err != nil {
		tb.Fatal(err)
	}
	return cleaner
}

// start runs the cleaner until the returned function is called, which waits for it and says how long that took.
func start(t *testing.T, cleaner *cleanup.Cleaner) (stop func() time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- cleaner.Run(ctx) }()
	return func() time.Duration {
		t.Helper()
		began := time.Now()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
		return time.Since(began)
	}
}

func logged(logger *watermill.CaptureLoggerAdapter, level watermill.LogLevel) int {
	return len(logger.Captured()[level])
}

func wantBetween(t *testing.T, what string, got, low, high time.Duration) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s is %s, want %s to %s", what, got, low, high)
	}
}
