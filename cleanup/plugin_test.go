package cleanup_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox/cleanup"
)

func newRouter(t *testing.T) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return router
}

// hangingStore says when a batch began, and lets it end with its context only.
func hangingStore() (store *scriptedStore, began, ended <-chan struct{}) {
	begin, end := make(chan struct{}, 1), make(chan struct{}, 1)
	return &scriptedStore{script: func(ctx context.Context, _ call) (int, error) {
		begin <- struct{}{}
		<-ctx.Done()
		end <- struct{}{}
		return 0, ctx.Err()
	}}, begin, end
}

// run runs the router, and returns a channel that says when it ended.
func run(t *testing.T, router *message.Router) <-chan struct{} {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := router.Run(context.Background()); err != nil { //nolint:usetesting // it ends by Close
			t.Error(err)
		}
	}()
	<-router.Running()
	return done
}

//nolint:paralleltest // looks for goroutines of its own
func TestPluginStopsWhenTheRouterIsClosed(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	store, began, ended := hangingStore()
	cleaner := newCleaner(t, cleanup.Config{Store: store, BatchTimeout: time.Hour})
	router := newRouter(t)
	router.AddPlugin(cleaner.Plugin(t.Context()))
	done := run(t, router)
	<-began
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	<-ended
	<-done
}

//nolint:paralleltest // looks for goroutines of its own
func TestPluginStopsWhileTheRouterWaitsForHandlers(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	store, began, ended := hangingStore()
	cleaner := newCleaner(t, cleanup.Config{Store: store, BatchTimeout: time.Hour})
	router := newRouter(t)
	router.AddPlugin(cleaner.Plugin(t.Context()))
	pubSub := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	handling, release := make(chan struct{}), make(chan struct{})
	router.AddConsumerHandler("handler", "topic", pubSub, func(*message.Message) error {
		close(handling)
		<-release
		return nil
	})
	done := run(t, router)
	if err := pubSub.Publish("topic", message.NewMessage("1", nil)); err != nil {
		t.Fatal(err)
	}
	<-handling
	<-began
	closed := make(chan error, 1)
	go func() { closed <- router.Close() }()
	<-ended // although the router is not closed yet
	close(release)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	<-done
}

//nolint:paralleltest // looks for goroutines of its own
func TestPluginStopsWithItsContextAndWithTheCleaner(t *testing.T) {
	for way, stop := range stops {
		t.Run(way, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			store, began, ended := hangingStore()
			cleaner := newCleaner(t, cleanup.Config{Store: store, BatchTimeout: time.Hour})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			router := newRouter(t)
			router.AddPlugin(cleaner.Plugin(ctx))
			done := run(t, router)
			<-began
			if err := stop(cleaner, cancel); err != nil {
				t.Error(err)
			}
			<-ended
			if router.IsClosed() {
				t.Error("the router is closed")
			}
			if err := router.Close(); err != nil {
				t.Error(err)
			}
			<-done
		})
	}
}

func TestPluginPausesWhileTheRouterDoesNotAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var silentUntil atomic.Pointer[time.Time]
		now := time.Now()
		silentUntil.Store(&now)
		isClosed := func() bool {
			time.Sleep(time.Until(*silentUntil.Load()))
			return false
		}
		store := &scriptedStore{script: rows(0)}
		cleaner := newCleaner(t, cleanup.Config{Store: store, Interval: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		go cleanup.RunBeside(cleaner, ctx, isClosed)
		time.Sleep(time.Minute)
		before := len(store.called())

		silent := time.Now().Add(time.Minute)
		silentUntil.Store(&silent)
		time.Sleep(time.Second)
		stopped := len(store.called())
		time.Sleep(58 * time.Second)
		if during := len(store.called()); during != stopped || before < 50 {
			t.Errorf("%d runs before, %d after a second, %d in the silence", before, stopped, during)
		}
		time.Sleep(time.Minute)
		if after := len(store.called()); after < stopped+50 {
			t.Errorf("%d runs after the silence", after-stopped)
		}
		cancel()
		synctest.Wait()
	})
}
