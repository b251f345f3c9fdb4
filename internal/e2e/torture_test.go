//go:build !race

// Without the race detector, which watermill-amqp does not pass when the broker goes away and comes back.

package e2e_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/internal/testserver"
)

// TestTorture runs a two-stage pipeline, each stage in a process of its own, while consumers, the database, the broker and
// connections are killed at random. It has servers of its own. `make torture` runs it for longer.
func TestTorture(t *testing.T) {
	t.Parallel()
	orders := number(t, "INBOX_TORTURE_MESSAGES", 600)
	faults := number(t, "INBOX_TORTURE_FAULTS", 10)
	random := seeded(t)
	postgres := startServer(t, "postgres", func() (*testserver.Server, error) { return testserver.PostgreSQL() })
	rabbitmq := startServer(t, "rabbitmq", testserver.RabbitMQ)

	s := openShop(t, "pgx", postgres.DSN)
	declare(t, rabbitmq.DSN, s.Prefix+"orders", s.Prefix+"payments", s.Prefix+"poison")
	stages := []*process{
		newProcess(t, consumer{Shop: *s, RabbitMQ: rabbitmq.DSN, Handlers: []string{"pay"}}),
		newProcess(t, consumer{Shop: *s, RabbitMQ: rabbitmq.DSN, Handlers: []string{"book"}}),
	}
	for _, stage := range stages {
		stage.start()
	}

	kinds := []struct {
		name   string
		inject func()
	}{
		{"consumer killed", func() {
			stage := stages[random.IntN(len(stages))]
			stage.kill()
			stage.start()
		}},
		{"connections terminated", func() {
			// It may be that the server is still recovering.
			_, _ = s.count(t.Context(), "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
		}},
		{"database killed", func() { restart(t, postgres) }},
		{"broker killed", func() { restart(t, rabbitmq) }},
	}
	injected := make([]int, len(kinds))

	published := make(chan struct{})
	go func() {
		defer close(published)
		// One in five is published twice, and every one as often as it takes.
		publishPaced(t, rabbitmq.DSN, s.Prefix+"orders", orders, faults)
	}()
	for i := range faults {
		time.Sleep(time.Duration(200+random.IntN(1000)) * time.Millisecond) // faults at random times are the point
		kind := random.IntN(len(kinds))
		if i < len(kinds) {
			kind = i // each of them at least once
		}
		kinds[kind].inject()
		injected[kind]++
	}
	<-published
	ctx := t.Context()
	booked := func() int {
		n, err := s.count(ctx, "SELECT count(DISTINCT id) FROM {ledger}")
		if err != nil {
			return 0
		}
		return n
	}
	// As long as it goes on, it may take its time.
	for last, since := booked(), time.Now(); last < orders; time.Sleep(100 * time.Millisecond) {
		if now := booked(); now > last {
			last, since = now, time.Now()
		}
		if time.Since(since) > 90*time.Second {
			break
		}
	}
	waitFor(t, 2*time.Minute, "empty queues", func() bool {
		return ready(t, rabbitmq.DSN, s.Prefix+"orders") == 0 && ready(t, rabbitmq.DSN, s.Prefix+"payments") == 0
	})
	for _, stage := range stages {
		stage.terminate()
	}

	var report strings.Builder
	for i, kind := range kinds {
		fmt.Fprintf(&report, "%s %d, ", kind.name, injected[i])
	}
	lost, doubled := 0, 0
	for _, table := range []string{"payments", "ledger"} {
		all, err := s.count(ctx, "SELECT count(*) FROM {"+table+"}")
		if err != nil {
			t.Fatal(err)
		}
		distinct, err := s.count(ctx, "SELECT count(DISTINCT id) FROM {"+table+"}")
		if err != nil {
			t.Fatal(err)
		}
		lost += orders - distinct
		doubled += all - distinct
	}
	t.Logf("faults: %smessages %d, effects %d, lost %d, doubled %d", report.String(), orders, 2*orders-lost, lost, doubled)
	if lost != 0 || doubled != 0 {
		t.Error("not exact")
	}
	wantCounts(t, s, map[string]int{"SELECT count(*) FROM {inbox}": 2 * orders})
	for _, queue := range []string{"orders", "payments", "poison"} {
		wantEmptyQueue(t, rabbitmq.DSN, s.Prefix+queue)
	}
}

// publishPaced publishes the orders over the time of the faults.
func publishPaced(t *testing.T, url, topic string, orders, faults int) {
	for from := 0; from < orders; {
		n := min(max(orders/(faults+1), 1), orders-from)
		publishRange(t, url, topic, from, from+n, func(i int) int { return 1 + (i+1)%5/4 })
		from += n
		select {
		case <-time.After(300 * time.Millisecond):
		case <-t.Context().Done():
			return
		}
	}
}

func restart(t *testing.T, server *testserver.Server) {
	t.Helper()
	server.Kill()
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
}
