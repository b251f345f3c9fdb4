package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

// deliverEverywhere delivers each of the messages to every shop, at the same time, until it is acknowledged there. It returns
// how many of the deliveries ran the handler, and how often a delivery had to be repeated.
func deliverEverywhere(t *testing.T, shops []*shop, from, end int) (repeated int64) {
	t.Helper()
	var wg sync.WaitGroup
	var again atomic.Int64
	for _, s := range shops {
		dedup := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer", LockTimeout: 2 * time.Second})
		const workers = 4
		for worker := range workers {
			wg.Go(func() {
				for i := from + worker; i < end; i += workers {
					id := fmt.Sprintf("order-%d", i)
					for {
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
						err := dedup.Process(ctx, inbox.Key{MessageID: id}, func(ctx context.Context) error {
							return s.exec(ctx, "INSERT INTO {effects} VALUES ('"+id+"')")
						})
						cancel()
						if err == nil || errors.Is(err, inbox.ErrDuplicate) {
							break
						}
						again.Add(1)
						if t.Context().Err() != nil {
							return
						}
						time.Sleep(20 * time.Millisecond) // as a broker that delivers again
					}
				}
			})
		}
	}
	wg.Wait()
	return again.Load()
}

// TestGaleraClaimsOnceOnAllNodes delivers every message on all three nodes at once, while one of them is killed and joins
// again.
func TestGaleraClaimsOnceOnAllNodes(t *testing.T) {
	t.Parallel()
	nodes, err := testserver.Galera(3)
	if testserver.IsMissing(err) {
		testenv.Missing(t, "galera", err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		t.Cleanup(node.Remove)
	}
	first := openShop(t, "mysql", nodes[0].DSN)
	shops := []*shop{first}
	for _, node := range nodes[1:] {
		s := &shop{Store: "mysql", DSN: node.DSN, Prefix: first.Prefix}
		if err := s.open(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.close)
		shops = append(shops, s)
	}
	const orders = 150
	again := deliverEverywhere(t, shops, 0, orders)

	nodes[2].Kill()
	again += deliverEverywhere(t, shops[:2], orders, 2*orders)
	if err := nodes[2].Start(); err != nil {
		t.Fatal(err)
	}
	again += deliverEverywhere(t, shops, orders, 3*orders) // what it missed, and more
	t.Logf("%d deliveries were repeated", again)
	for _, s := range shops {
		waitFor(t, 30*time.Second, "replication", func() bool {
			n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox}")
			return err == nil && n == 3*orders
		})
		wantCounts(t, s, map[string]int{"SELECT count(*) FROM {effects}": 3 * orders, "SELECT count(DISTINCT id) FROM {effects}": 3 * orders})
	}
}

// TestNothingAcknowledgedIsLostWithThePrimary kills a primary with a synchronous standby while messages are processed, and
// promotes the standby.
func TestNothingAcknowledgedIsLostWithThePrimary(t *testing.T) {
	t.Parallel()
	primary := startServer(t, "postgres", func() (*testserver.Server, error) { return testserver.PostgreSQL() })
	standby := startServer(t, "postgres", func() (*testserver.Server, error) { return testserver.SynchronousStandby(primary) })
	s := &shop{Store: "pgx", DSN: testserver.FailoverDSN(primary, standby), Prefix: "failover_"}
	if err := s.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	if err := s.create(t.Context()); err != nil {
		t.Fatal(err)
	}
	const orders = 600
	done := make(chan struct{})
	go func() {
		defer close(done)
		deliverEverywhere(t, []*shop{s, s}, 0, orders) // twice each
	}()
	waitFor(t, time.Minute, "half of the orders", func() bool {
		n, err := s.count(t.Context(), "SELECT count(*) FROM {inbox}")
		return err == nil && n >= orders/2
	})
	primary.Kill()
	if err := standby.Promote(); err != nil {
		t.Fatal(err)
	}
	<-done
	wantCounts(t, s, map[string]int{
		"SELECT count(*) FROM {inbox}": orders, "SELECT count(*) FROM {effects}": orders, "SELECT count(DISTINCT id) FROM {effects}": orders,
	})
}

// TestPgBouncerInTransactionMode has 50 messages at a time share two connections, in every exec mode that PgBouncer carries
// before version 1.21.
func TestPgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()
	postgres := startServer(t, "postgres", func() (*testserver.Server, error) { return testserver.PostgreSQL() })
	bouncer := startServer(t, "pgbouncer", func() (*testserver.Server, error) { return testserver.PgBouncer(postgres, 2) })
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			s := openShop(t, "pgx", postgres.DSN)
			config, err := pgxpool.ParseConfig(bouncer.DSN)
			if err != nil {
				t.Fatal(err)
			}
			config.MaxConns = 50
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			store, err := pgxstore.New(pool, pgxstore.Config{Table: s.Prefix + "inbox"})
			if err != nil {
				t.Fatal(err)
			}
			dedup := newDeduplicator(t, inbox.Config{Store: store, Consumer: "consumer"})
			var wg sync.WaitGroup
			for worker := range 50 {
				wg.Go(func() {
					for i := range 20 {
						id := fmt.Sprintf("order-%d", (worker*20+i)/2) // each twice
						err := dedup.Process(t.Context(), inbox.Key{MessageID: id}, func(ctx context.Context) error {
							_, err := store.Executor(ctx).Exec(ctx, s.named("INSERT INTO {effects} VALUES ($1)"), id)
							return err
						})
						if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			wantCounts(t, s, map[string]int{"SELECT count(*) FROM {inbox}": 500, "SELECT count(*) FROM {effects}": 500})
			if mode == pgx.QueryExecModeDescribeExec {
				return // outside of a transaction, PgBouncer can have it describe on one connection and execute on another
			}
			if err := store.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
			if _, err := store.DeleteExpired(t.Context(), time.Hour, 10); err != nil {
				t.Error(err)
			}
		})
	}
}
