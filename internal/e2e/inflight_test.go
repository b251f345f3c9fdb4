package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/watermill-inbox/inbox"
)

// TestDuplicatesInFlight has ten duplicates of a message whose handler takes long, beside other messages, on a pool of five
// connections: in the process that runs the handler, and in another one.
func TestDuplicatesInFlight(t *testing.T) {
	t.Parallel()
	for _, store := range []string{"pgx", "stdlib", "mysql"} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			owner := newShop(t, store)
			here, there := owner.another(t, 5), owner.another(t, 5)
			deduplicators := make(map[*shop]*inbox.Deduplicator)
			for _, s := range []*shop{here, there} {
				deduplicators[s] = newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer", LockTimeout: 3 * time.Second})
			}
			entered, running, finished := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			finish := sync.OnceFunc(func() { close(running) })
			t.Cleanup(finish) // before the pool is closed
			go func() {
				_, err := deduplicators[here].Middleware(func(msg *message.Message) ([]*message.Message, error) {
					close(entered)
					<-running
					return nil, here.takeFromStock(msg)
				})(message.NewMessage("slow", []byte("slow")))
				finished <- err
			}()
			<-entered

			others := 0
			for _, process := range []struct {
				*shop
				holds int // connections: in the handler's process that of the handler, in the other that of one waiter
			}{{here, 1}, {there, 1}} {
				dedup := deduplicators[process.shop]
				waited := make(chan struct{})
				var waiters sync.WaitGroup
				for range 10 {
					waiters.Go(func() {
						_, err := dedup.Middleware(func(*message.Message) ([]*message.Message, error) {
							t.Error("a duplicate in flight reached the handler")
							return nil, nil
						})(message.NewMessage("slow", []byte("slow")))
						if !errors.Is(err, inbox.ErrInFlight) || dedup.ShouldPoison(err) {
							t.Errorf("duplicate: %v", err)
						}
					})
				}
				t.Cleanup(waiters.Wait)
				go func() { waiters.Wait(); close(waited) }()

				handler := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, process.takeFromStock(msg) })
				for flowed, waiting := 0, true; waiting; flowed++ {
					if inUse := process.inUse(); inUse > process.holds {
						t.Fatalf("%d connections in use", inUse)
					}
					others++
					id := fmt.Sprint("other-", others)
					if _, err := handler(message.NewMessage(id, []byte(id))); err != nil {
						t.Fatal(err)
					}
					select {
					case <-waited:
						waiting = false
						if flowed < 100 {
							t.Errorf("only %d other messages meanwhile", flowed)
						}
					default:
					}
				}
			}
			finish()
			if err := <-finished; err != nil {
				t.Errorf("the first delivery: %v", err)
			}
			wantCounts(t, owner, map[string]int{allEffects: others + 1, effectsOfOrders: others + 1, allRows: others + 1})
		})
	}
}

// TestSecondConnectionFromAnExhaustedPoolIsExplained has as many handlers as there are connections, each of which uses the
// database beside its transaction.
func TestSecondConnectionFromAnExhaustedPoolIsExplained(t *testing.T) {
	t.Parallel()
	for store := range databases {
		for _, conns := range []int{1, 3} {
			if store == "sqlite" && conns > 1 {
				continue // it has one writer at a time
			}
			t.Run(fmt.Sprintf("%s/conns=%d", store, conns), func(t *testing.T) {
				t.Parallel()
				owner := newShop(t, store)
				s := owner.another(t, conns)
				logger := watermill.NewCaptureLogger()
				dedup := newDeduplicator(t, inbox.Config{Store: s.store, Consumer: "consumer", Logger: logger})
				var all sync.WaitGroup // of the connections are in use
				all.Add(conns)
				h := middleware.Timeout(2 * time.Second)(dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
					all.Done()
					all.Wait()
					return nil, errors.Join(s.book(msg), s.beside(msg.Context(), "SELECT 1"))
				}))
				var deliveries sync.WaitGroup
				var failed atomic.Int32
				for i := range conns {
					deliveries.Go(func() {
						_, err := h(message.NewMessage(fmt.Sprint(i), nil))
						if err == nil {
							return // it got the connection of one that failed
						}
						failed.Add(1)
						if !errors.Is(err, context.DeadlineExceeded) || dedup.ShouldPoison(err) {
							t.Errorf("error %v", err)
						}
					})
				}
				deliveries.Wait()
				if failed.Load() == 0 {
					t.Error("no delivery failed")
				}
				succeeded := conns - int(failed.Load())
				if logged := fmt.Sprintf("%+v", logger.Captured()[watermill.ErrorLogLevel]); !strings.Contains(logged, "second connection") {
					t.Errorf("logged %s", logged)
				}
				wantCounts(t, owner, map[string]int{allBookings: succeeded, allRows: succeeded})
				waitFor(t, ample, "all connections to be free", func() bool { return s.inUse() == 0 })
			})
		}
	}
}
