//go:build !race

// Without the race detector, which would slow down what is to be tortured.

package e2e_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/internal/testserver"
)

// TestTorture runs a two-stage pipeline, each stage in a process of its own, while consumers, the database, the broker and
// connections are killed at random. It has servers of its own. `make torture` runs it for longer.
func TestTorture(t *testing.T) {
	t.Parallel()
	n := setting(t, "INBOX_TORTURE_MESSAGES", 10_000, strconv.Atoi)
	duration := setting(t, "INBOX_TORTURE_DURATION", 20*time.Second, time.ParseDuration)
	random := seeded(t)
	postgres := startServer(t, "postgres", func() (*testserver.Server, error) { return testserver.PostgreSQL() })
	rabbitmq := startServer(t, "rabbitmq", testserver.RabbitMQ)
	toPostgres, toRabbitMQ := newRelay(t, postgres), newRelay(t, rabbitmq)

	s := openShop(t, "pgx", postgres.DSN)
	declare(t, amqpConfig(rabbitmq.DSN), s.queues()...)
	shop := *s
	shop.DSN = toPostgres.DSN
	stages := []*process{
		newProcess(t, consumer{Shop: shop, RabbitMQ: toRabbitMQ.DSN, Handlers: []string{"pay"}}),
		newProcess(t, consumer{Shop: shop, RabbitMQ: toRabbitMQ.DSN, Handlers: []string{"book"}}),
	}
	for _, stage := range stages {
		stage.start()
	}

	restarts := newRestarts(t)
	killConsumer := func() bool {
		stage := stages[random.IntN(len(stages))]
		stage.kill()
		stage.start()
		return true
	}
	terminateBackends := func() bool {
		terminated, err := s.count(t.Context(), `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
			WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
		return err == nil && terminated > 0 // else it is not there, or the consumers are not
	}
	kinds := []*struct {
		name     string
		weight   int
		inject   func() bool // false: not now
		injected int
	}{
		{name: "consumer killed", weight: 4, inject: killConsumer},
		{name: "database connections cut", weight: 4, inject: toPostgres.cut},
		{name: "database sessions terminated", weight: 2, inject: terminateBackends},
		{name: "broker connections cut", weight: 2, inject: toRabbitMQ.cut},
		{name: "database killed", weight: 1, inject: func() bool { return restarts.begin(postgres) }},
		{name: "broker killed", weight: 1, inject: func() bool { return restarts.begin(rabbitmq) }},
	}
	var weighted, each []int
	for i, kind := range kinds {
		each = append(each, i)
		for range kind.weight {
			weighted = append(weighted, i)
		}
	}

	published := make(chan error)
	go func() {
		published <- publishOver(t.Context(), duration, rabbitmq.DSN, s.queues()[0], n, random.Uint64())
	}()
	began := time.Now()
	for time.Since(began) < duration || len(each) > 0 { // each kind at least once
		time.Sleep(time.Duration(100+random.IntN(800)) * time.Millisecond) // faults at random times are the point
		kind := weighted[random.IntN(len(weighted))]
		if len(each) > 0 {
			kind = each[0]
		}
		if kinds[kind].inject() {
			kinds[kind].injected++
			if len(each) > 0 {
				each = each[1:]
			}
		}
	}
	restarts.wait()
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	faulted := time.Since(began)

	// As long as it goes on, it may take its time.
	for last, since := -1, time.Now(); last < 2*n && time.Since(since) < ample; time.Sleep(100 * time.Millisecond) {
		if now := s.mustCount(t, allRows); now != last {
			last, since = now, time.Now()
		}
	}
	drain(t, rabbitmq.DSN, s.queues(), stages...)

	var faults []string
	total := 0
	for _, kind := range kinds {
		faults = append(faults, fmt.Sprintf("  %-30s %6d", kind.name, kind.injected))
		total += kind.injected
	}
	payments, bookings := s.mustCount(t, allPayments), s.mustCount(t, allBookings)
	paid, booked := s.mustCount(t, paidOrders), s.mustCount(t, bookedOrders)
	lost, doubled := 2*n-paid-booked, payments-paid+bookings-booked
	t.Logf("%d faults in %s, %s in all:\n%s\nmessages %d (1 in 5 published twice), effects %d, lost %d, doubled %d, "+
		"outputs not known to be published %d",
		total, faulted.Round(time.Second), time.Since(began).Round(time.Second), strings.Join(faults, "\n"),
		n, payments+bookings, lost, doubled, s.mustCount(t, unpublished))
	if lost != 0 || doubled != 0 {
		t.Error("not exact")
	}
	wantCounts(t, s, map[string]int{allRows: 2 * n})
}

// publishOver publishes n orders spread over the time, one in five of them twice.
func publishOver(ctx context.Context, duration time.Duration, url, queue string, n int, seed uint64) error {
	random := rand.New(rand.NewPCG(seed, 0))
	began := time.Now()
	for from := 0; from < n; {
		due := min(n, 1+int(float64(n)*time.Since(began).Seconds()/duration.Seconds()))
		msgs := orders(random, from, due, func(order int) int {
			if order%5 == 0 {
				return 2
			}
			return 1
		})
		if err := publish(ctx, url, queue, msgs...); err != nil {
			return err
		}
		from = due
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// restarts kills servers and starts them again, while the torture goes on.
type restarts struct {
	t       *testing.T
	running sync.WaitGroup
	mu      sync.Mutex
	busy    map[*testserver.Server]bool
}

func newRestarts(t *testing.T) *restarts {
	r := &restarts{t: t, busy: make(map[*testserver.Server]bool)}
	t.Cleanup(r.running.Wait)
	return r
}

// begin kills a server, unless it is just being started.
func (r *restarts) begin(server *testserver.Server) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.busy[server] {
		return false
	}
	r.busy[server] = true
	r.running.Go(func() {
		server.Kill()
		if err := server.Start(); err != nil {
			r.t.Error(err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.busy[server] = false
	})
	return true
}

func (r *restarts) wait() { r.running.Wait() }

// relay passes connections on to a server, until they are cut.
type relay struct {
	DSN    string
	target string

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func newRelay(t *testing.T, server *testserver.Server) *relay {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := func(n int) string { return ":" + strconv.Itoa(n) + "/" }
	r := &relay{
		DSN:    strings.Replace(server.DSN, port(server.Port), port(listener.Addr().(*net.TCPAddr).Port), 1),
		target: "127.0.0.1:" + strconv.Itoa(server.Port),
		conns:  make(map[net.Conn]struct{}),
	}
	t.Cleanup(func() {
		_ = listener.Close()
		r.cut()
	})
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go r.serve(client)
		}
	}()
	return r
}

func (r *relay) serve(client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := net.Dial("tcp", r.target)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	r.mu.Lock()
	r.conns[client], r.conns[server] = struct{}{}, struct{}{}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.conns, client)
		delete(r.conns, server)
	}()
	ended := make(chan struct{}, 2)
	pass := func(to, from net.Conn) {
		_, _ = to.(*net.TCPConn).ReadFrom(from)
		ended <- struct{}{}
	}
	go pass(client, server)
	go pass(server, client)
	<-ended
}

// cut breaks all connections, whatever is under way on them.
func (r *relay) cut() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for conn := range r.conns {
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	}
	return len(r.conns) > 0
}
