# Every module of the repository.
MODULES := . $(patsubst %/go.mod,%,$(wildcard _examples/go.mod bench/go.mod))
GO      := go
TEST    := $(GO) run ./internal/cmd/withservers $(GO) test -race -shuffle=on -timeout 10m
LINT    := $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: test ci lint fmt tidy-check bench bench-once build quickstart torture vulncheck

## test: all tests, with throwaway servers
test: build
	$(TEST) ./...

## build: build and vet every module
build:
	@set -e; for module in $(MODULES); do (cd $$module && $(GO) build ./... && $(GO) vet ./...); done

## ci: what has to pass before anything lands
ci: export INBOX_TEST_REQUIRE = postgres,mariadb,rabbitmq,pgbouncer,spin
ci: tidy-check build lint
	$(TEST) ./...
	$(MAKE) bench-once quickstart

## lint: golangci-lint
lint:
	@set -e; for module in $(MODULES); do echo "lint $$module"; (cd $$module && $(LINT) run --config $(CURDIR)/.golangci.yml ./...); done

## fmt: format the code
fmt:
	$(LINT) fmt

tidy-check:
	@set -e; for module in $(MODULES); do (cd $$module && $(GO) mod tidy -diff); done

## bench: all benchmarks
bench:
	$(GO) run ./internal/cmd/withservers $(GO) test -run '^$$' -bench . ./...

## bench-once: each benchmark once
bench-once:
	$(GO) run ./internal/cmd/withservers $(GO) test -run '^$$' -bench . -benchtime 1x ./...

## quickstart: the main job, which fails unless it is exact
quickstart:
	$(GO) -C _examples run ./quickstart

## vulncheck: known vulnerabilities (needs the network)
vulncheck:
	$(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

## torture: the pipeline under random kills (INBOX_TORTURE_MESSAGES, INBOX_TORTURE_FAULTS, INBOX_TEST_SEED)
torture: export INBOX_TORTURE_MESSAGES ?= 100000
torture: export INBOX_TORTURE_FAULTS ?= 200
torture:
	$(GO) run ./internal/cmd/withservers $(GO) test -v -timeout 2h -run TestTorture ./internal/e2e
