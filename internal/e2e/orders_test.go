package e2e_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
)

// TestEveryOrderOnceThoughConsumersAreKilled feeds PostgreSQL from RabbitMQ.
func TestEveryOrderOnceThoughConsumersAreKilled(t *testing.T) {
	t.Parallel()
	for queues, config := range map[string]func(string) amqp.Config{"classic": amqpConfig, "quorum": quorumConfig} {
		t.Run("queues="+queues, func(t *testing.T) {
			t.Parallel()
			const n = 2000
			random := seeded(t)
			url := testenv.RabbitMQ(t)
			s := newShop(t, "pgx")
			declare(t, config(url), s.queues()...)
			twiceOrMore := func(int) int { return 2 + random.IntN(2) }
			if err := publish(t.Context(), url, s.queues()[0], orders(random, 0, n, twiceOrMore)...); err != nil {
				t.Fatal(err)
			}

			p := newProcess(t, consumer{Shop: *s, RabbitMQ: url, Quorum: queues == "quorum", Handlers: []string{"take_from_stock"}})
			for kill := range 6 {
				p.start()
				goal := n*(kill+1)/8 + random.IntN(n/10) // in the middle of the work, at a random point
				waitFor(t, ample, fmt.Sprintf("%d orders", goal), func() bool { return s.mustCount(t, allRows) >= goal })
				p.kill()
			}
			p.start()
			drain(t, url, s.queues(), p)
			wantCounts(t, s, map[string]int{taken: n, allEffects: n, effectsOfOrders: n, allRows: n})
		})
	}
}

// TestTheSameWiringOnGoChannelAndSQLite is the test above with another broker and another store.
func TestTheSameWiringOnGoChannelAndSQLite(t *testing.T) {
	t.Parallel()
	const n = 200
	s := newShop(t, "sqlite")
	broker := newBroker()
	router, err := s.wire(newDeduplicator(t, inbox.Config{Store: s.store}), broker, broker, "take_from_stock")
	if err != nil {
		t.Fatal(err)
	}
	start(t, router)
	var wg sync.WaitGroup
	for range 2 { // deliver each order twice, some of them at the same time
		for worker := range 2 {
			wg.Go(func() {
				for i := worker; i < n; i += 2 {
					id := fmt.Sprintf("order-%d", i)
					if err := broker.Publish(s.queues()[0], message.NewMessage(id, []byte(id))); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	wantCounts(t, s, map[string]int{taken: n, allEffects: n, effectsOfOrders: n, allRows: n})
}

// TestDeathInTheHandlerLeavesNothing kills the process when its handler has done its work, but not returned.
func TestDeathInTheHandlerLeavesNothing(t *testing.T) {
	t.Parallel()
	for store := range databases {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			url := testenv.RabbitMQ(t)
			s := newShop(t, store)
			declare(t, amqpConfig(url), s.queues()...)
			if err := publish(t.Context(), url, s.queues()[0], message.NewMessage("id", []byte("id"))); err != nil {
				t.Fatal(err)
			}
			p := newProcess(t, consumer{
				Shop: *s, RabbitMQ: url, Handlers: []string{"take_from_stock"},
				DieAt: inHandler, Died: filepath.Join(t.TempDir(), "died"),
			})
			p.start()
			p.wantSuicide()
			wantCounts(t, s, map[string]int{taken: 0, allEffects: 0, allRows: 0})
			p.start()
			waitFor(t, ample, "the redelivery", func() bool { return s.mustCount(t, allRows) == 1 })
			drain(t, url, s.queues(), p)
			wantCounts(t, s, map[string]int{taken: 1, allEffects: 1, allRows: 1})
		})
	}
}

// TestRollingDeploymentIsExact ends one of two instances after the other, while they work.
func TestRollingDeploymentIsExact(t *testing.T) {
	t.Parallel()
	const n = 2000
	random := seeded(t)
	url := testenv.RabbitMQ(t)
	s := newShop(t, "pgx")
	declare(t, amqpConfig(url), s.queues()...)
	if err := publish(t.Context(), url, s.queues()[0], orders(random, 0, n, func(int) int { return 2 })...); err != nil {
		t.Fatal(err)
	}
	c := consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"take_from_stock"}}
	instances := []*process{newProcess(t, c), newProcess(t, c)}
	for _, instance := range instances {
		instance.start()
	}
	const rounds = 8
	for round := range rounds {
		goal := n * (round + 1) / (rounds + 2)
		waitFor(t, ample, fmt.Sprintf("%d orders", goal), func() bool { return s.mustCount(t, allRows) >= goal })
		instance := instances[round%2]
		instance.terminate()
		instance.start()
	}
	drain(t, url, s.queues(), instances...)
	wantCounts(t, s, map[string]int{taken: n, allEffects: n, effectsOfOrders: n, allRows: n})
}
